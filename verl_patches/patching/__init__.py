"""How anything upstream is replaced: one table of rows, one engine that applies, reverts, proves and explains them."""
