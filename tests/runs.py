"""Runs that tests compose: the facts of a config of this repository over the catalogue, as commands compose them."""

from collections.abc import Sequence

from verl_patches.catalog import rows_of
from verl_patches.config.compose import compose
from verl_patches.planning.memory_plan import with_recompute
from verl_patches.spec import RunSpec, Trees


def composed(name: str, overrides: Sequence[str] = (), trees: Trees = Trees()) -> RunSpec:  # noqa: B008 frozen
    """Return the facts of a run of configs/`name`.yaml with Hydra `overrides`, with `auto` recomputation decided."""
    return with_recompute(compose(name, overrides, rows_of, trees))
