"""Engine start of line a3 in one fresh process."""

from __future__ import annotations

import importlib
import os
import sys


def arguments(cases: dict[str, dict], early: str | None = None) -> dict | str:
    """{case: Megatron's arguments, or what refuses them}; with `early`, what `prepare` says once that is imported.

    A case: {"world_size", "config" (the section a worker sees), "hf" (config.json)}; the process is prepared for the
    one called base.
    """
    from tests.model.mindspeed_start import rows
    from verl_patches.patching import engine
    from verl_patches.patching.switches import from_environment

    engine.start(rows(), from_environment()).apply()
    import torch

    from verl_patches.errors import ConfigError
    from verl_patches.model.mindspeed import start
    from verl_patches.model.mindspeed.arguments import arguments_of, explain

    before = {"compile": torch.compile, "argv": sys.argv}
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
