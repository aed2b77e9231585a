"""Where this Python finds upstream packages, without importing them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from verl_patches.errors import ConfigError

VERL_CONFIG = "ppo_megatron_trainer"


def installed_root(package: str) -> Path | None:
    """The folder that holds a top-level package as this interpreter finds it, links resolved; None without one."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).resolve().parent if places else None


def verl_config_dir(verl_path: Path | None = None) -> Path:
    """verl's trainer/config folder, in the checkout `verl_path` or the installed package; ConfigError without one."""
    if verl_path is not None:
        roots, wanted = [Path(verl_path), Path(verl_path) / "verl"], f"--verl-path {verl_path}"
    else:
        root = installed_root("verl")
        roots, wanted = [root / "verl"] if root else [], "the installed package verl"
    for root in roots:
        if (root / "trainer" / "config" / f"{VERL_CONFIG}.yaml").is_file():
            return (root / "trainer" / "config").resolve()
    raise ConfigError(
        f"{wanted} has no trainer/config/{VERL_CONFIG}.yaml; "
        "run scripts/setup.sh, or give --verl-path with the folder of a verl checkout"
    )
