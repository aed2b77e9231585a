"""What to set where the memory plan does not fit: keys and the first value of each that is enough.

Values are found by planning again (planning/memory_plan.py) with one key changed, so each of them is enough by itself.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_patches.config import hccl
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import ModelShape
from verl_patches.memory.expected import A3_SEEN_BYTES
from verl_patches.model.mindspeed.arguments import explain
from verl_patches.planning.memory_plan import followed_peaks, host_is_short, too_much
from verl_patches.upstream.checkouts import LINE

_ACTOR, _REF, _ROLLOUT = (f"actor_rollout_ref.{name}." for name in ("actor", "ref", "rollout"))
_MODEL = "actor_rollout_ref.model."
_CHECKPOINTING = f"{_MODEL}gradient_checkpointing_kwargs.activations_checkpoint_"
_TP = "megatron.tensor_model_parallel_size"
_RECOMPUTE = MappingProxyType({
    f"{_MODEL}enable_gradient_checkpointing": True,
    f"{_CHECKPOINTING}granularity": "full",
    f"{_CHECKPOINTING}method": "block",
})  # fmt: skip
_UPDATE, _LOG_PROB, _REFERENCE, _CACHED = ("update",), ("old_log_prob",), ("ref",), ("wake_kv", "rollout")
_TRAINING = (*_UPDATE, *_LOG_PROB, *_REFERENCE)
_SHORT = 4  # so many values are tried one by one; longer lists are in order of their effect


class Knob(NamedTuple):
    """Keys that all get one value; `phases` that they may help (None: all), `values` the cheapest first.

    `beside`: other keys that the value needs.
    """

    phases: tuple[str, ...] | None
    keys: tuple[str, ...]
    values: Sequence[Any]
    beside: Mapping[str, Any] = MappingProxyType({})


def knobs(config: DictConfig, model: ModelShape) -> Iterator[Knob]:
    """The keys that may help, the cheapest in speed first."""
    section, recipe = config.actor_rollout_ref, config.recipe
    actor, rollout, ref = section.actor, section.rollout, section.ref
    yield Knob(None, ("recipe.train.swap_optimizer",), [True])
    pieces = recipe.train.swap_optimizer_times
    yield Knob(_UPDATE, ("recipe.train.swap_optimizer_times",), [pieces << n for n in range(1, 5)])
    yield Knob(_UPDATE, (f"{_ACTOR}ppo_micro_batch_size_per_gpu",), _halves(actor.ppo_micro_batch_size_per_gpu))
    kwargs, name = section.model.get("gradient_checkpointing_kwargs") or {}, "activations_checkpoint_num_layers"
    recomputed = kwargs.get(name) or 0 if section.model.enable_gradient_checkpointing else 0
    layers = range(recomputed + 1, model.num_hidden_layers + 1)
    yield Knob(_UPDATE, (f"{_MODEL}gradient_checkpointing_kwargs.{name}",), layers, _RECOMPUTE)
    micro_batch = "log_prob_micro_batch_size_per_gpu"
    yield Knob(_LOG_PROB, (_ROLLOUT + micro_batch,), _halves(rollout[micro_batch]))
    yield Knob(_REFERENCE, (_REF + micro_batch,), _halves(ref[micro_batch]))
    shares = [round(rollout.gpu_memory_utilization - n / 100, 2) for n in range(1, 100)]
    yield Knob(_CACHED, (f"{_ROLLOUT}gpu_memory_utilization",), [share for share in shares if share > 0])
    yield Knob(("reshard",), ("recipe.reshard.bucket_bytes",), _halves(recipe.reshard.bucket_bytes))
    step, given = hccl.BUFFER_STEP_MIB, hccl.buffer_mib(config, model)
    lowest = step * max(1, math.ceil(hccl.buffer_need_mib(config, model) / step))
    yield Knob(None, ("recipe.hccl.buffer_mib",), range((given - 1) // step * step, lowest - 1, -step))
    yield Knob(None, (f"{_ACTOR}megatron.param_offload", f"{_ACTOR}megatron.grad_offload"), [True])
    yield Knob(None, (f"{_REF}megatron.param_offload",), [True])
    tp = actor.megatron.tensor_model_parallel_size
    yield Knob((*_TRAINING, "reshard"), (_ACTOR + _TP, _REF + _TP), [tp << n for n in range(1, 5)])


def _halves(number: int | None) -> list[int]:
    number = number or 1
    return [number >> n for n in range(1, number.bit_length())]


def advice(config: DictConfig, model: ModelShape, rows: Collection[str], plan: dict[str, Any]) -> list[str]:
    """One sentence for phases that do not fit, and for a node: die, largest terms, keys with values that fit.

    `plan`: `memory_plan` of the same arguments; nothing where all fits. A key that may help every phase gets a value
    with which all of them fit. Keys of which no value is enough are left out. Phases of one die that the same keys help
    share a sentence, with the figures of the highest.
    """
    short = too_much(plan)
    names, ways = tuple(phase["phase"] for phase in short), {phase["phase"]: [] for phase in short}
    for knob in knobs(config, model) if short else ():
        helped = [names] if knob.phases is None else [(name,) for name in names if name in knob.phases]
        for phases in helped:
            found = _first(
                knob, lambda value, knob=knob, phases=phases: _fits(config, model, rows, phases, knob, value)
            )
            for name in phases if found is not None else ():
                ways[name].append(_words(config, knob, found))
    alike: dict[tuple, list[dict[str, Any]]] = {}  # such as wake_kv and rollout
    for phase in short:
        alike.setdefault((phase["rank"], *ways[phase["phase"]]), []).append(phase)
    said = [_of_phases(phases, list(todo)) for (_, *todo), phases in alike.items()]
    return said + ([_of_node(plan["host"])] if host_is_short(plan) else [])


def _words(config: DictConfig, knob: Knob, value: Any) -> str:
    changes = {key: each for key, each in knob.beside.items() if OmegaConf.select(config, key) != each}
    return " ".join(
        f"{key}={str(each).lower()}" for key, each in {**dict.fromkeys(knob.keys, value), **changes}.items()
    )


def _of_phases(alike: list[dict[str, Any]], ways: list[str]) -> str:
    phase = max(alike, key=lambda each: each["peak_bytes"])
    largest = sorted(phase["bytes"].items(), key=lambda item: -item[1])[:3]
    todo = f"set one of: {' | '.join(ways)}" if ways else "no single key is enough: use more dies, or change several"
    return (
        f"{', '.join(each['phase'] for each in alike)}: die {phase['rank']} needs {phase['peak_bytes'] / 1e9:.2f} GB "
        f"of {A3_SEEN_BYTES / 1e9:.2f}; largest: "
        f"{', '.join(f'{term} {size / 1e9:.2f}' for term, size in largest)}; {todo}"
    )


def _of_node(host: dict[str, Any]) -> str:
    largest = max(host["bytes"], key=host["bytes"].get)
    return (
        f"host memory: workers of a node pin {host['node_bytes'] / 1e9:.1f} GB, recipe.memory.host_gib allows "
        f"{host['limit_bytes'] / 1e9:.1f}; largest: {largest} {host['bytes'][largest] / 1e9:.1f}; "
        "use fewer dies a node (trainer.n_gpus_per_node), or more nodes, over which the optimizer is sharded"
    )


def _first(knob: Knob, fits: Callable[[Any], bool]) -> Any:
    """The first of the knob's values that fits, None if there is none."""
    values = knob.values
    if len(values) <= _SHORT:
        return next((value for value in values if fits(value)), None)
    if not fits(values[-1]):
        return None
    return values[bisect.bisect_left(range(len(values)), True, key=lambda place: fits(values[place]))]


def _fits(
    config: DictConfig, model: ModelShape, rows: Collection[str], phases: Collection[str], knob: Knob, value: Any
) -> bool:
    """Whether `phases` fit with the knob at `value`; False for its present value, or where nothing allows it."""
    changed = config.copy()
    for key, each in {**dict.fromkeys(knob.keys, value), **knob.beside}.items():
        OmegaConf.update(changed, key, each, force_add=True)
    if changed == config:
        return False
    try:
        found = followed_peaks(changed, model, rows)
    except ConfigError:
        return False
    if config.recipe.line == LINE and any(row.how == "refused" for row in explain(changed)):
        return False
    return all(each["peak_bytes"] <= A3_SEEN_BYTES for each in found["phases"] if each["phase"] in phases)
