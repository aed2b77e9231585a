"""Write the catalogue's table into README.md and README_zh.md between their markers, or check that it is there.

    python scripts/patch_table.py [--write]     exits 1 where a table is stale
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- patches:begin -->\n", "<!-- patches:end -->"


def with_table(text: str, table: str) -> str:
    """`text` with `table` between the markers."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{table}{END}{tail}"


def stale(write: bool = False) -> list[str]:
    """Names of the READMEs whose table is not the catalogue's; `write` mends them."""
    sys.path.insert(0, str(ROOT))
    from verl_patches.catalog import ROWS
    from verl_patches.patching.report import markdown_table

    found = []
    for name in ("README.md", "README_zh.md"):
        text = (ROOT / name).read_text()
        fresh = with_table(text, markdown_table(ROWS))
        if fresh != text:
            found.append(name)
            if write:
                (ROOT / name).write_text(fresh)
    return found


if __name__ == "__main__":
    names = stale(write="--write" in sys.argv[1:])
    print(("written: " if "--write" in sys.argv[1:] else "stale: ") + (", ".join(names) or "none"))
    raise SystemExit(1 if names and "--write" not in sys.argv[1:] else 0)
