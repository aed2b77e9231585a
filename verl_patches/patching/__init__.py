"""Replace upstream code by one table of rows and one engine that applies, reverts, proves and explains them."""
