"""What a configuration would hold on its worst rank, phase by phase: by our memory schedule and by verl's. Modelled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from verl_patches.cluster.recipe import VLLM_DTYPES
from verl_patches.layout.inventory import ModelShape, build_inventory
from verl_patches.layout.of_config import rollout_layout_of, train_layout_of
from verl_patches.memory.expected import A3_DIE_BYTES, Setting, in_dtype, peaks
from verl_patches.memory.schedule import SCHEDULE, VERL, direct_sync, schedule_followed, staying, switches_of


def memory_plan(config: DictConfig, model: ModelShape, rows: Collection[str]) -> dict[str, Any]:
    """{modelled, hbm_bytes, followed, swapped, orders}: `peaks` of our schedule, of verl's on this line, of the run's.

    `hbm_bytes` is that of an A3 die, None on other platforms, where no KV cache can be told. `followed` names the
    schedule that the run follows, by the ids of the `rows` that are on; verl's schedule is with verl's own weight sync.
    Activations, HCCL's buffers and CANN's context are in none of the figures.
    ConfigError where sizes do not divide.
    """
    recipe, actor, ref = config.recipe, config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.ref.megatron
    inventory = in_dtype(build_inventory(model), VLLM_DTYPES[recipe.dtype])
    layouts = train_layout_of(config), rollout_layout_of(config)
    direct = direct_sync(rows)
    synced = recipe.weight_sync.enabled and direct
    switches = switches_of(rows, enforce_eager=config.actor_rollout_ref.rollout.enforce_eager, synced=synced)
    stays = staying(
        param_offload=actor.param_offload, optimizer_offload=actor.optimizer_offload or recipe.train.swap_optimizer,
        ref_offload=ref.param_offload, own_sleep_mode=switches["own_sleep_mode"], synced=synced)  # fmt: skip
    ours = _setting(config, layouts[0].dp)
    skip = recipe.train.skip_old_log_prob
    followed = schedule_followed(recipe.line, skip_old_log_prob=skip, **switches)
    gathered = replace(ours, bucket_bytes=None)
    compared = [(schedule.without("old_log_prob") if skip else schedule, setting)
                for schedule, setting in ((SCHEDULE, ours), (VERL[recipe.line], gathered))]
    if followed.name not in (schedule.name for schedule, _ in compared):
        compared.append((followed, ours if direct else gathered))
    return {
        "modelled": True, "hbm_bytes": A3_DIE_BYTES if recipe.platform == "npu" else None, "followed": followed.name,
        "orders": [peaks(schedule, inventory, *layouts, setting, stays) for schedule, setting in compared],
        "swapped": recipe.train.swap_optimizer,
    }  # fmt: skip


def _setting(config: DictConfig, replicas: int) -> Setting:
    recipe, rollout = config.recipe, config.actor_rollout_ref.rollout
    additional = ((rollout.engine_kwargs or {}).get("vllm") or {}).get("additional_config") or {}
    graph = additional.get("torchair_graph_config") or {}
    return Setting(
        train_library="mindspeed" if recipe.line == "a3" else "megatron-local",
        rollout_library="vllm-ascend" if graph.get("enable_multistream_moe") else "vllm",
        bucket_bytes=recipe.reshard.bucket_bytes,
        swap_pieces=recipe.train.swap_optimizer_times if recipe.train.swap_optimizer else None,
        kv_share=rollout.gpu_memory_utilization if recipe.platform == "npu" else 0.0,
        tensor_cache_bytes=_kept_bytes(config) // replicas if recipe.tensor_cache.enabled else 0,
        absorbed_copies=recipe.platform == "npu" or recipe.line == "a3",  # MindSpeed's view on the CPU too
    )


def _kept_bytes(config: DictConfig) -> int:
    """At most, of all samples of a step (worker/tensor_cache_stages.py): int32 ids, fp32 log-probs of the responses.

    Log-probs are of rollout, of the old policy unless that pass is left out, and of the reference if a loss needs it.
    """
    data, rollout = config.data, config.actor_rollout_ref.rollout
    ref = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    columns = 1 + (not config.recipe.train.skip_old_log_prob) + bool(ref)
    tokens = data.max_prompt_length + data.max_response_length * (1 + columns)
    return 4 * data.train_batch_size * rollout.n * tokens


def memory_rows(memory: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """(title, columns, rows) of a table: peak of each phase on the worst rank, one column an order.

    The order that the run follows is the first column, and one with the same figures as it has none of its own.
    """
    hbm = memory["hbm_bytes"]
    first, *others = sorted(memory["orders"], key=lambda found: found["order"] != memory["followed"])
    equal = [found["order"] for found in others if _figures(found) == _figures(first)]
    schedules = [first, *(found for found in others if found["order"] not in equal)]
    unit, scale = ("GB", 1e9) if max(found["peak_bytes"] for found in schedules) >= 1e9 else ("MB", 1e6)

    def said(size_bytes: float) -> str:
        return f"{size_bytes / scale:.2f}" if size_bytes else "-"

    def against_die(size_bytes: int) -> str:
        return said(size_bytes) + (" TOO MUCH" if hbm is not None and size_bytes > hbm else "")

    rows = []
    for number, phase in enumerate(schedules[0]["phases"]):
        who = " ".join(f"{group} {said(size)}" for group, size in phase["bytes"].items())
        rows.append((phase["phase"], *(against_die(found["phases"][number]["peak_bytes"]) for found in schedules), who))
    rows.append(("highest", *(against_die(found["peak_bytes"]) for found in schedules),
                 f"a die has {said(hbm)}" if hbm else "the KV cache is not told on this platform"))
    beside = "; the swapped optimizer's come on top" if memory["swapped"] else ""
    rows.append(("from, to host", *(f"{said(found['to_device_bytes']['max'])}, {said(found['to_host_bytes']['max'])}"
                                    for found in schedules), f"{unit} copied in a step, worst rank{beside}"))
    rows.append(("empty_cache() calls", *(str(found["empty_cache_calls"]) for found in schedules), "in a step"))
    title = (f"memory by phase (modelled): {unit} at the peak of the worst rank, without activations; "
             f"this run follows {memory['followed']}"
             + "".join(f"; {schedule}: the same bytes" for schedule in equal))
    return title, ("phase", *(found["order"] for found in schedules), f"who, in {schedules[0]['order']}"), rows


def _figures(schedule: dict[str, Any]) -> tuple[Any, ...]:
    """What the table shows of a schedule, but for its empty_cache calls."""
    return ([phase["peak_bytes"] for phase in schedule["phases"]], schedule["to_device_bytes"]["max"],
            schedule["to_host_bytes"]["max"])
