"""Provide records for each handler of `data build`, and call the build."""

import json
import shutil

from pyarrow import parquet

from verl_patches.tools.data.build import build_data
from verl_patches.tools.data.settings import read_settings

HI, HELLO, NO = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello"), ("assistant", "no"))
)


def say(n):
    return {"role": "user", "content": f"Say {n}."}


def _instruction(n):
    if n % 2:
        return {"instruction": f"Say {n}.", "input": "Loud." if n % 4 else "", "output": f"{n}!"}
    return {"messages": [HI, HELLO, say(n), {"role": "assistant", "content": f"{n}!"}]}


def _preference(n):
    if n % 2:
        return {"prompt": f"Say {n}.", "chosen": f"{n}!", "rejected": "no"}
    return {"chosen": [say(n), HELLO], "rejected": [say(n), NO]}


RECORDS = {  # handler -> function that makes record number n
    "maths": lambda n: {"problem": f"What is {n} + 1?", "answer": n + 1, "solution": "Add."},
    "gsm8k": lambda n: {"question": f"How many are {n}?", "answer": f"so\n#### {n},000"},
    "instruction": _instruction,
    "preference": _preference,
    "labelled": lambda n: {"prompt": f"Say {n}.", "completion": "no" if n % 2 else f"{n}!", "label": n % 2 == 0},
    "process": lambda n: {"prompt": f"Say {n}.", "completions": ["one", "two"], "labels": [True, n % 2 / 2]},
    "text": lambda n: {"text": f"Raw text {n}."},
}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make(folder, records, handler="maths", out="out", **keys):
    """Build `records`, a list or a path, to a new folder/out and return (code, report)."""
    shutil.rmtree(folder / out, ignore_errors=True)
    source = write_lines(folder / "rows.jsonl", records) if isinstance(records, list) else records
    keys = {"input": str(source), "handler_name": handler, "output_prefix": str(folder / out), **keys}
    (folder / "build.yaml").write_text(json.dumps(keys))
    return build_data(read_settings(folder / "build.yaml"))


def read(folder, name="train"):
    return parquet.read_table(folder / f"{name}.parquet").to_pylist()


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
