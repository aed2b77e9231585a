"""Print "hash first-last" of every statement of a corpus file, as this Python sees it; the .golden files hold the same.

python tests/patching/corpus/hashes.py tests/patching/corpus/py310.txt
"""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from verl_patches.patching.fingerprint import flatten, whole_hash


def lines(path):
    every = [s for node in ast.parse(path.read_bytes()).body for s in flatten(node, path)]
    return [f"whole {whole_hash(every)}", *(f"{s.hash} {s.line}-{s.end_line}" for s in every)]


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1]))))
