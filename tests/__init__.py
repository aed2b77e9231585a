"""Make `tests` a package, so that it is found before any installed package of that name."""
