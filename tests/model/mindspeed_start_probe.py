"""Engine start of line a3 in one fresh process; prints JSON: `python mindspeed_start_probe.py FOLDER [MODULE]`.

FOLDER holds NAME.json files: {"world_size", "config" (the section a worker sees), "hf" (config.json)}, "base" first.
With MODULE, that is imported before, and only what `prepare` says to it is printed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path


def _rows():
    path = Path(__file__).resolve().with_name("mindspeed_rank.py")
    spec = importlib.util.spec_from_file_location("mindspeed_rank", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rows()


def main(folder: Path, early: str | None = None) -> dict | str:
    from verl_patches.patching import engine
    from verl_patches.patching.switches import from_environment

    engine.start(_rows(), from_environment()).apply()
    import torch

    from verl_patches.errors import ConfigError
    from verl_patches.model.mindspeed import start
    from verl_patches.model.mindspeed.arguments import arguments_of, explain

    before = {"compile": torch.compile, "argv": sys.argv}
    cases = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if early is not None:
        importlib.import_module(early)
        try:
            return start.prepare(cases["base"]["config"])
        except ConfigError as error:
            return str(error)
    start.prepare(cases["base"]["config"])
    found = {"compile_is_torchs": torch.compile is before["compile"], "argv_is_ours": sys.argv is before["argv"]}
    for name, case in cases.items():
        os.environ.update(WORLD_SIZE=str(case["world_size"]), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
        try:
            words = arguments_of(explain(case["config"], case["hf"]))
            start._same_features(words)
            args = start._arguments(words)
            found[name] = {key: value for key, value in vars(args).items() if isinstance(value, (int, float, str))}
        except ConfigError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))
