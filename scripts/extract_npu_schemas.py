"""Write the schemas of the torch_npu functions on our paths from its wheels, or (--check) compare with the committed.

    for machine in aarch64 x86_64; do
        pip download --no-deps --only-binary=:all: --python-version 3.10 --platform manylinux2014_$machine \
            torch_npu==2.5.1.post1 -d WHEELS
    done
    python scripts/extract_npu_schemas.py WHEELS/torch_npu-2.5.1.post1-*.whl [--check]

Which functions: verl_patches/platform/npu/op_schemas.py. Exits: 0 written or equal, 1 --check found a difference, 2
wrong use.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from verl_patches.errors import ConfigError
from verl_patches.platform.npu import op_schemas


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    asked = parser.parse_args()
    try:
        found = op_schemas.extract(asked.wheels, op_schemas.FUNCTIONS)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    text = json.dumps(found, indent=1) + "\n"
    if not asked.check:
        op_schemas.FILE.write_text(text)
        print(f"{op_schemas.FILE.name}: {len(found['functions'])} schemas of torch_npu {found['version']}")
        return 0
    known = json.loads(op_schemas.FILE.read_text())
    different = sorted(set(known["functions"]) ^ set(found["functions"]))
    print("\n".join([f"differs: {line}" for line in different]) or f"equal: {len(found['functions'])} schemas")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
