"""Find the source of an upstream symbol, as the pin file, comments and messages of this repository cite them."""

from __future__ import annotations

import ast
from pathlib import Path

from verl_patches.patching import fingerprint as fp


def symbol_source(symbol: str, root: Path) -> str:
    """Return the source of "module.Class.method", of a variable or of a whole module; "" if there is none.

    `root` is the folder that holds the top-level package. The module is the longest prefix that has a file there.
    """
    parts = symbol.split(".")
    modules = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    module = next((name for name in modules if fp.source_file(name, root)), parts[0])
    if module == symbol:
        return fp.source_file(module, root).read_text()
    found = fp.definitions(f"{module}:{symbol.removeprefix(module + '.')}", root)
    texts = (ast.get_source_segment(each.file.read_text(encoding="utf-8"), each.node) for each in found)
    return "\n".join(text or "" for text in texts)
