"""Write the schemas of the torch_npu functions on our paths from its wheels, or (--check) compare with the file.

    for machine in aarch64 x86_64; do
        pip download --no-deps --only-binary=:all: --python-version 3.10 --platform manylinux2014_$machine \
            torch_npu==2.5.1.post1 -d WHEELS
    done
    python scripts/extract_npu_schemas.py WHEELS/torch_npu-2.5.1.post1-*.whl [--check]

A wheel is a zip, nothing is installed. It declares its functions in one yaml (`WHEEL_FILE`), section `custom`, one line
each; those of ATB are strings of the library that registers them (`ATB_LIBRARY`). Which functions:
verl_patches/emulation/op_schemas.py. Exits: 0 written or equal, 1 --check found a difference, 2 wrong use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from verl_patches.emulation import op_schemas
from verl_patches.errors import ConfigError

WHEEL_FILE = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
ATB_LIBRARY = "torch_npu/lib/libop_plugin_atb.so"
_ATB_SCHEMA = re.compile(rb"(?<![\w:])(?:_?npu_\w+)(?:\.\w+)?\([^\x00-\x1f]*\) -> [^\x00-\x1f]+")


def extract(wheels: Sequence[Path], names: Iterable[str], atb_names: Iterable[str]) -> dict[str, Any]:
    """Return the content of the committed file, read from wheels of one version (one a machine type), which must agree.

    Raises ConfigError that names the functions that a wheel does not declare, or the wheel that differs.
    """
    wanted, wanted_atb = sorted(set(names)), sorted(set(atb_names))
    declared = {}
    for wheel in wheels:
        declared[wheel] = _declared_functions(wheel, wanted), _declared_atb_functions(wheel, wanted_atb)
    versions = {wheel.name.split("-")[1] for wheel in wheels}
    lines = declared[wheels[0]]
    different = [wheel.name for wheel in wheels if declared[wheel] != lines]
    if len(versions) != 1 or different:
        raise ConfigError(
            f"wheels: expected one version and equal declarations, found {sorted(versions)}, different in {different}"
        )
    hashes = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in sorted(wheels)}
    about = {"package": "torch_npu", "version": versions.pop(), "sha256": hashes, "source": WHEEL_FILE}
    return {**about, "functions": lines[0], "atb_source": ATB_LIBRARY, "atb_functions": lines[1]}


def _declared_functions(wheel: Path, wanted: list[str]) -> list[str]:
    if not zipfile.is_zipfile(wheel):
        raise ConfigError(
            f"{wheel}: expected a wheel, torch_npu-{op_schemas.TORCH_NPU_VERSION}-cp310-cp310-*.whl, found another file"
        )
    with zipfile.ZipFile(wheel) as archive:
        if WHEEL_FILE not in archive.namelist():
            raise ConfigError(f"{wheel}: expected a torch_npu wheel, found one without {WHEEL_FILE}")
        content = yaml.safe_load(archive.read(WHEEL_FILE))
    entries = [entry for section in ("custom", "custom_autograd") for entry in content.get(section) or ()]
    lines = {" ".join(entry["func"].split()) for entry in entries}
    kept = sorted(line for line in lines if line.split("(", 1)[0].split(".")[0] in wanted)
    missing = set(wanted) - {op_schemas.parse_schema(line).name for line in kept}
    if missing:
        raise ConfigError(
            f"{wheel.name}: expected a declaration of each function, found none of {', '.join(sorted(missing))}"
        )
    return kept


def _declared_atb_functions(wheel: Path, wanted: list[str]) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read(ATB_LIBRARY) if ATB_LIBRARY in archive.namelist() else b""
    lines = {match.group().decode() for match in _ATB_SCHEMA.finditer(library)}
    kept = sorted(line for line in lines if line.split("(", 1)[0].split(".")[0] in wanted)
    missing = set(wanted) - {op_schemas.parse_schema(line, gather_outputs=False).name for line in kept}
    if missing:
        raise ConfigError(f"{wheel.name}: expected {ATB_LIBRARY} to register {', '.join(sorted(missing))}, found none")
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+", help="torch_npu wheels of one version, one a machine type")
    parser.add_argument("--check", action="store_true", help="compare with the committed file, and write nothing")
    arguments = parser.parse_args()
    try:
        found = extract(arguments.wheels, op_schemas.FUNCTIONS, op_schemas.ATB_FUNCTIONS)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    text = json.dumps(found, indent=1) + "\n"
    if not arguments.check:
        op_schemas.SCHEMA_FILE.write_text(text)
        count = len(found["functions"]) + len(found["atb_functions"])
        print(f"{op_schemas.SCHEMA_FILE.name}: {count} schemas of torch_npu {found['version']}")
        return 0
    known = json.loads(op_schemas.SCHEMA_FILE.read_text())
    lines = [set(content["functions"] + content.get("atb_functions", [])) for content in (known, found)]
    different = sorted(lines[0] ^ lines[1])
    print("\n".join([f"differs: {line}" for line in different]) or f"equal: {len(lines[1])} schemas")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
