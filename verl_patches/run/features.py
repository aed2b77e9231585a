"""Decide which patches (rows of the catalogue) a run needs, by the features that are on and by its level.

The launcher ships their ids (`RunSpec.rows`) to every process of the run. Where verl_patches is only imported, without
the launcher, the rows of all features are applied; those of features that are off then find nothing to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from verl_patches.patching.spec import LEVELS, PatchSpec
from verl_patches.patching.switches import Switches
from verl_patches.spec import RunSpec
from verl_patches.step.batches.limits import has_dynamic_batches
from verl_patches.step.log_probs.ratio_settings import has_correction


def feature_states(run: RunSpec) -> dict[str, bool]:
    """Return {feature that rows of the catalogue name: whether it is on in a run}."""
    recipe = run.recipe
    train = recipe.train
    return {
        "critic": run.has_critic,
        "dynamic_batches": has_dynamic_batches(run.verl.actor_rollout_ref),
        "fixed_data": not run.samples,
        "graphs": bool(run.graphs),
        "memory_ledger": recipe.memory.ledger != "off",
        "on_policy": train.skip_old_log_prob
        or train.importance_ratio == "sequence"
        or has_correction(recipe.rollout_correction)
        or not run.samples,
        "remote_code": recipe.trust_remote_code,
        "reward_models": bool(run.reward_models),
        "routing_replay": train.routing_replay is not None,
        "small_groups": recipe.hccl.small_groups_mib is not None,
        "tensor_cache": recipe.tensor_cache.enabled,
        "value_models": run.has_critic or bool(run.reward_models),
    }


def needed_rows(
    rows: Iterable[PatchSpec], features: Collection[str], switches: Switches, level: str = LEVELS[-1]
) -> frozenset[str]:
    """Return the ids of the patches (rows) that are on in a run with these features at this level.

    A pattern in `switches` decides about each row whose id it matches; a row that another one needs is on with it.
    """
    by_id = {row.id: row.on_line(switches.line) for row in rows}
    off = {row.id for row in by_id.values() if row.feature and row.feature not in features}
    if level != LEVELS[-1]:
        off |= {row.id for row in by_id.values() if row.role == "speed"}
    allowed = {name for name, row in by_id.items() if switches.decide(row)[0]}
    decided = replace(switches, rows=tuple(by_id.keys() - off))
    waiting = [name for name, row in by_id.items() if decided.decide(row)[0]]
    needed: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [need for need in by_id[name].needs if need in allowed]
    return frozenset(needed)
