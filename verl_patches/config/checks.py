"""The rules that a configuration must keep before anything starts: layouts, sizes, batches, lengths, memory.

Each rule is one `Check` with what was expected and found, so that a plan can show all of them. Messages name the
upstream place that would refuse the configuration, or the figure that would be wrong.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from verl_patches.config import hccl
from verl_patches.config.compose import (
    config_file,
    graph_arguments,
    hf_config_of,
    model_changes,
    model_shape_of,
    reads_weights,
    shape_file,
    vllm_arguments,
)
from verl_patches.config.environment import DROPPED, derive
from verl_patches.config.recipe import VLLM_DTYPES
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import ModelShape, build_inventory, read_model_shape
from verl_patches.layout.model_folder import QUANTIZATION, fp8_fault, weight_files
from verl_patches.layout.parallel import ParallelLayout, rollout_layout_of, train_layout_of
from verl_patches.reshard.plan import make_blocks
from verl_patches.rollout.log_probs import CHECK_TOKENS
from verl_patches.tensor_cache import limits
from verl_patches.trainer import on_policy, truth_check
from verl_patches.upstream.support import refusal, refused_keys, shell_findings

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@dataclass(frozen=True)
class Check:
    """One rule: `detail` says what holds, or what was expected, what was found and what to change.

    `note`: the rule holds, but its detail should be read before a start.
    """

    name: str
    ok: bool
    detail: str
    note: bool = False


def check_config(config: DictConfig) -> list[Check]:
    """All rules in order. A layout that cannot be built is a failed check, and the rules that need it are left out."""
    checks: list[Check] = []
    model = model_shape_of(config)
    train = _built("train layout", train_layout_of, config, checks)
    rollout = _built("rollout layout", rollout_layout_of, config, checks)
    checks += _folder_checks(config, model) + _data_checks(config)
    if train:
        checks += _train_checks(config, train, model) + _checkpoint_checks(config, train)
    if rollout:
        checks += _rollout_checks(config, rollout, model)
    if train and rollout:
        checks += _batch_checks(config, train, rollout) + _sync_checks(config, train, rollout, model)
    checks += _length_checks(config) + _line_checks(config) + _on_policy_checks(config)
    checks += _truth_check_checks(config)
    checks += [Check("tensor cache", False, fault) for fault in limits.faults(config)]
    checks += [*_swap_checks(config), _sleep_check(config)]
    return checks + [Check(*found) for found in hccl.checks(config, model)]


def require(checks: Iterable[Check]) -> None:
    """ConfigError that lists every failed check; nothing if all hold."""
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.ok]
    if failed:
        raise ConfigError("Invalid configuration:\n  " + "\n  ".join(failed))


def _either(name: str, ok: bool, held: str, fault: str) -> Check:
    return Check(name, ok, held if ok else fault)


def _built(
    name: str, build: Callable[[DictConfig], ParallelLayout], config: DictConfig, checks: list[Check]
) -> ParallelLayout | None:
    try:
        layout = build(config)
    except ConfigError as error:
        checks.append(Check(name, False, str(error)))
        return None
    checks.append(Check(name, True, str(layout)))
    return layout


def _without_error(name: str, run: Callable[[], object], held: str) -> Check:
    try:
        run()
    except ConfigError as error:
        return Check(name, False, str(error))
    return Check(name, True, held)


def _divides(name: str, whole: int, part: int, key: str, quotient: str) -> Check:
    return _either(
        name,
        whole % part == 0,
        f"{whole} / {part} = {whole // part} {quotient}",
        f"{whole} is not a multiple of {part}; change {key}",
    )


# model folder and data


def _folder_checks(config: DictConfig, model: ModelShape) -> list[Check]:
    """Where the model's folder is on this machine: it holds the planned model, in weights that can be read."""
    checks, path = [], config_file(config)
    if QUANTIZATION in model_changes(config):
        checks.append(
            Check(
                "model folder",
                False,
                f"actor_rollout_ref.model.override_config.model_config holds {QUANTIZATION}; expected none: that of "
                "config.json is not read, and null ends rank 0, where verl prints it (configuration_utils.py:845)",
            )
        )
    if not path.is_file():
        here = f"{path.parent} is not on this machine, so its weights were not checked; every node reads it"
        return [*checks, Check("model folder", True, f"{here} (actor_rollout_ref.model.path)", note=True)]
    found, key = read_model_shape(path), f"recipe.model_shape {config.recipe.model_shape}"
    checks.append(
        _either(
            "model shape",
            found == model,
            "same model",
            f"{path} describes another model than {key}: {found}, expected {model}",
        )
    )
    if reads_weights(config) and not weight_files(path.parent):
        text = f"{path.parent} has no safetensors file: whether its weights are bf16 is not known"
        checks.append(Check("model weights", True, text, note=True))
    elif reads_weights(config):
        fault = fp8_fault(path.parent)
        checks.append(Check("model weights", fault is None, fault or "none is stored in fp8"))
    return checks


def _data_checks(config: DictConfig) -> list[Check]:
    """A note for data files that are not on this machine; the trainer's node reads them."""
    checks = []
    for key in ("train_files", "val_files"):
        files = config.data.get(key) or []
        absent = [file for file in ([files] if isinstance(files, str) else files) if not Path(file).exists()]
        if absent:
            text = f"{', '.join(absent)} is not on this machine; data/prepare_deepscaler.py makes it (data.{key})"
            checks.append(Check("data", True, text, note=True))
    return checks


# layouts


def _train_checks(config: DictConfig, train: ParallelLayout, model: ModelShape) -> list[Check]:
    actor, ref = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.ref.megatron
    layers = model.num_hidden_layers
    unequal = [f"{key} {actor[key]} != {ref[key]}" for key in _SIZES if actor[key] != ref[key]]
    checks = [
        _without_error(
            "layers",
            lambda: train.chunk_layers(layers),
            f"{layers} layers over {train.pp} stage(s) x {train.vpp} chunk(s)",
        ),
        _experts("train experts", train.ep, model.n_routed_experts, f"{_ACTOR}.expert_model_parallel_size"),
        _divides(
            "attention heads",
            model.num_attention_heads,
            train.tp,
            f"{_ACTOR}.tensor_model_parallel_size",
            "heads a rank",
        ),
        _either(
            "actor = ref",
            not unequal,
            "one layout",
            "expected actor and ref to share one layout, as verl initializes Megatron once per process "
            f"(megatron_workers.py:88); found {', '.join(unequal)}",
        ),
    ]
    whole = f"experts are whole, {train.ep} ranks share them"
    split = f"each expert is split over {train.etp} ranks, as tp"
    fault = fault_of_experts(train)
    checks.append(Check("experts under tp", fault is None, fault or (whole if train.etp == 1 else split)))
    if config.recipe.train.expert_split == "tp_extend_ep":
        checks.append(
            _either(
                "recipe.train.expert_split",
                train.etp == 1 and train.ep % train.tp == 0,
                f"ep {train.ep} = tp {train.tp} x MindSpeed ep {train.ep // train.tp}, whole experts",
                "expected expert_tensor_parallel_size 1 and expert_model_parallel_size a multiple of tp "
                f"{train.tp}; found {train.etp} and {train.ep}",
            )
        )
    return checks


def fault_of_experts(train: ParallelLayout) -> str | None:
    """Why Megatron would compute wrong expert outputs in this training layout; None where it would not."""
    if train.tp == 1 or train.ep > 1 or train.etp > 1:
        return None
    return (
        f"expected ep > 1 or etp = tp at tp {train.tp}: "
        "with ep 1 and etp 1 Megatron adds up expert outputs of different tokens over TP ranks"
    )


def _checkpoint_checks(config: DictConfig, train: ParallelLayout) -> list[Check]:
    every = config.trainer.save_freq
    if every <= 0 or train.ep == 1:
        return []
    return [
        Check(
            "checkpoints",
            False,
            f"trainer.save_freq={every} with expert parallel size {train.ep}: verl saves "
            "the model on data-parallel rank 0 only (megatron_checkpoint_manager.py:236), experts of all others "
            "would be lost; expected trainer.save_freq=-1",
        )
    ]


def _rollout_checks(config: DictConfig, rollout: ParallelLayout, model: ModelShape) -> list[Check]:
    engine, recipe = vllm_arguments(config), config.recipe.rollout
    wanted = {"enable_expert_parallel": recipe.expert_parallel, "data_parallel_size": recipe.dp}
    unequal = [
        f"{key} is {engine.get(key)}, expected {value}" for key, value in wanted.items() if engine.get(key) != value
    ]
    checks = [
        _experts(
            "rollout experts",
            rollout.ep,
            model.n_routed_experts,
            "recipe.rollout.dp or rollout.tensor_model_parallel_size",
            rest_on_last=True,
        ),
        _divides(
            "rollout heads",
            model.num_attention_heads,
            rollout.tp,
            f"{_ROLLOUT}.tensor_model_parallel_size",
            "heads a rank",
        ),
        _either(
            "engine_kwargs.vllm",
            not unequal,
            "agrees with recipe.rollout",
            f"{'; '.join(unequal)}: set recipe.rollout, the engine's arguments follow it",
        ),
    ]
    if recipe.expert_parallel and rollout.ep == 1:
        checks.append(
            Check(
                "expert parallel",
                False,
                "recipe.rollout.expert_parallel needs rollout.tensor_model_parallel_size x recipe.rollout.dp > 1; "
                "found 1 rank an instance, where vLLM ignores it",
            )
        )
    return checks


def _experts(name: str, ep: int, experts: int, key: str, rest_on_last: bool = False) -> Check:
    if rest_on_last and ep <= experts and experts % ep:
        last = experts - (ep - 1) * (experts // ep)
        return Check(name, True, f"{experts // ep} of {experts} experts a rank, {last} on the last")
    return _either(
        name,
        ep <= experts and experts % ep == 0,
        f"{experts // ep} of {experts} experts a rank",
        f"{experts} routed experts over {ep} ranks: expected a divisor of {experts}, at most {experts}; change {key}",
    )


# batches and lengths


def _batch_checks(config: DictConfig, train: ParallelLayout, rollout: ParallelLayout) -> list[Check]:
    actor, prompts, n = config.actor_rollout_ref.actor, config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini, micro = actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
    checks = [
        _divides(
            "prompts",
            prompts,
            rollout.world_size,
            "data.train_batch_size (verl hands each rank an equal share of the prompts)",
            "prompts a rank",
        ),
        _divides(
            "responses",
            prompts * n,
            train.dp,
            "data.train_batch_size or rollout.n (train data-parallel ranks)",
            "responses a train replica",
        ),
        _divides(
            "mini batch",
            prompts,
            mini,
            "actor.ppo_mini_batch_size (must divide data.train_batch_size)",
            "mini batches a step",
        ),
        _divides(
            "mini batch share",
            mini * n,
            train.dp,
            "actor.ppo_mini_batch_size (responses of a mini batch over train dp)",
            "responses of a mini batch a train replica",
        ),
    ]
    if not actor.use_dynamic_bsz and micro is None:
        checks.append(
            Check(
                "micro batch",
                False,
                "actor.ppo_micro_batch_size_per_gpu is null; verl needs it without use_dynamic_bsz",
            )
        )
    elif not actor.use_dynamic_bsz:
        checks.append(
            _divides(
                "micro batch",
                mini * n // train.dp,
                micro,
                "actor.ppo_micro_batch_size_per_gpu (responses a rank and mini batch)",
                "micro batches of a mini batch",
            )
        )
    seats = vllm_arguments(config).get("max_num_seqs")
    if seats is not None:
        budget = config.actor_rollout_ref.rollout.max_num_batched_tokens
        running = math.ceil(prompts * n / (rollout.world_size // rollout.tp))
        said = f"{running} responses a replica, {seats} at once, "
        checks.append(
            _either(
                "max_num_seqs",
                seats <= budget,
                f"{said}within max_num_batched_tokens {budget}",
                f"{said}expected <= max_num_batched_tokens {budget} (vLLM's SchedulerConfig refuses more)",
            )
        )
        checks += _graph_checks(config, min(running, seats))
    return checks


def _graph_checks(config: DictConfig, running: int) -> list[Check]:
    largest = max(graph_arguments(config).get("graph_batch_sizes") or (), default=None)
    if largest is None:
        return []
    return [
        _either(
            "graph batch sizes",
            largest >= running,
            f"largest graph {largest} holds the {running} responses that a replica decodes at once",
            f"largest graph {largest}, expected at least the {running} responses that a replica decodes at once; "
            "add it to graph_batch_sizes or lower max_num_seqs",
        )
    ]


def _length_checks(config: DictConfig) -> list[Check]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    longest = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    reach, budget = _max_positions(shape_file(config)), rollout.max_num_batched_tokens
    said = f"prompt + response {longest} tokens, model reaches {reach}"
    checks = [_either("lengths", longest <= reach, said, f"{said}; expected no more")]
    held = f"max_num_batched_tokens {budget} holds prompt + response {longest}"
    fault = f"max_num_batched_tokens {budget}, expected >= {longest}: "
    if rollout.enable_chunked_prefill:
        checks.append(
            _either(
                "chunked prefill",
                budget >= longest,
                held,
                fault + "verl refuses chunked prefill below it (vllm_rollout_spmd.py); "
                "vLLM V1 prefills in chunks anyway, so leave enable_chunked_prefill false",
            )
        )
    elif config.recipe.platform == "cpu":
        checks.append(_either("prefill", budget >= longest, held, fault + "engine V0 prefills whole prompts"))
    if rollout.enforce_eager:
        mode = "eager"
        fault = (
            "expected free_cache_engine=true with enforce_eager=true: the engine sleeps after each rollout, "
            "with both values of the key"
        )
    else:
        mode = "graph"
        fault = "expected free_cache_engine=false with enforce_eager=false: verl refuses both (vllm_rollout_spmd.py)"
    checks.append(_either("graph mode", bool(rollout.enforce_eager) == bool(rollout.free_cache_engine), mode, fault))
    return checks


def _max_positions(path: Path) -> int:
    reach = json.loads(path.read_text()).get("max_position_embeddings")
    if not isinstance(reach, int):
        raise ConfigError(f"{path}: expected max_position_embeddings, a whole number, found {reach!r}")
    return reach


# what the line, the recipe and the switches allow


def _line_checks(config: DictConfig) -> list[Check]:
    """What the pin file says that the line cannot do; a planned key is a note: a dry run is allowed, a start is not."""
    line, checks = config.recipe.line, []
    for entry, value in refused_keys(config):
        said = refusal(entry, value, line)
        if entry.planned:
            checks.append(Check(f"line {line}", True, f"a start is refused: {said}", note=True))
        else:
            checks.append(Check(f"line {line}", False, said))
    decided = {*DROPPED, *(variable.name for variable in derive(config) if variable.where != "node")}
    for found in shell_findings(line, decided=decided):
        if found.state == "problem":
            said = f"{found.name} is {found.found}, expected {found.expected}; {found.todo}"
            checks.append(Check("environment", False, said))
    return checks


def _on_policy_checks(config: DictConfig) -> list[Check]:
    faults = on_policy.faults(config, hf_config_of(config))
    if config.recipe.train.skip_old_log_prob and not faults:
        return [Check("on policy", True, "no pass for old log-probs: one mini batch and one epoch an update")]
    return [Check("on policy", False, fault) for fault in faults]


def _truth_check_checks(config: DictConfig) -> list[Check]:
    section, faults = config.recipe.logprob_check, list(truth_check.faults(config))
    if section.every is None or faults or section.action == "off":
        return [Check("truth check", False, fault) for fault in faults]
    said = f"from step 1 every {section.every}: {truth_check.sequences_of(config)} x {CHECK_TOKENS} tokens"
    return [Check("truth check", True, said)]


def _swap_checks(config: DictConfig) -> list[Check]:
    """On line pypi only: line a3 has rules of its own in model/mindspeed/arguments.py."""
    train, actor = config.recipe.train, config.actor_rollout_ref.actor.megatron
    if config.recipe.line != "pypi" or not train.swap_optimizer:
        return []
    faults = []
    if actor.optimizer_offload:
        faults.append("the states are on the host already: set actor.megatron.optimizer_offload=false")
    if train.swap_optimizer_times < 1:
        faults.append(f"recipe.train.swap_optimizer_times is {train.swap_optimizer_times}, expected at least 1")
    return [
        _either(
            "swap optimizer",
            not faults,
            f"states come in {train.swap_optimizer_times} pieces, or one tensor at a time",
            "; ".join(faults),
        )
    ]


def _switched_off(config: DictConfig, row: str) -> bool:
    matching = [pattern for pattern in config.recipe.patches if fnmatch.fnmatchcase(row, pattern[1:])]
    return bool(matching) and matching[-1].startswith("-")


def _sync_checks(config: DictConfig, train: ParallelLayout, rollout: ParallelLayout, model: ModelShape) -> list[Check]:
    """Whether the direct weight sync can serve this pair of layouts with these buckets; none where its row is off."""
    recipe = config.recipe
    if _switched_off(config, "reshard.direct"):
        return []
    served = functools.partial(
        _check_served,
        replace(model, torch_dtype=VLLM_DTYPES[recipe.dtype]),
        train,
        rollout,
        "mindspeed" if recipe.line == "a3" else "megatron-local",
        "vllm-ascend" if recipe.platform == "npu" else "vllm",
        recipe.reshard.bucket_bytes,
    )
    return [_without_error("weight sync", served, "every rank can receive the weights that it lacks")]


@functools.lru_cache(64)  # one command checks its configuration more than once
def _check_served(
    model: ModelShape,
    train: ParallelLayout,
    rollout: ParallelLayout,
    train_library: str,
    rollout_library: str,
    bucket_bytes: int,
) -> None:
    """ConfigError where the weights of `train` cannot be sent to `rollout`."""
    make_blocks(
        build_inventory(model),
        train,
        rollout,
        train_library=train_library,
        rollout_library=rollout_library,
        bucket_bytes=bucket_bytes,
    )


def _sleep_check(config: DictConfig) -> Check:
    """What the rollout engine's sleep does with its weights (memory/sleep_mode.py)."""
    name, recipe = "rollout memory", config.recipe
    own_sleep_off = _switched_off(config, "memory.sleep_mode")
    graphs = not config.actor_rollout_ref.rollout.enforce_eager
    if recipe.platform == "cpu" and (own_sleep_off or graphs):
        expected = []
        if own_sleep_off:
            expected.append("recipe.patches without -memory.sleep_mode")
        if graphs:
            expected.append("actor_rollout_ref.rollout.enforce_eager=true (graphs keep the addresses they captured)")
        return Check(name, False, f"vLLM has no sleep mode on a CPU; expected {', '.join(expected)}")
    if own_sleep_off:
        return Check(name, True, "row memory.sleep_mode is off: vLLM copies all weights to the host")
    copied = None
    if _switched_off(config, "reshard.direct"):
        copied = "row reshard.direct is off and verl's own sync is not known to write all of them"
    elif not recipe.weight_sync.enabled:
        copied = "recipe.weight_sync.enabled is false"
    if graphs:
        how = "by vLLM's sleep mode, which keeps the addresses that graphs captured"
        weights = "weights that the sync writes are not copied, unless other memory shares their segment"
        if copied:
            weights = f"weights are copied to the host, as {copied}"
    else:
        how = "to torch's pool"
        weights = "weights that the sync writes are not copied"
        if copied:
            weights = f"weights stay, as {copied}"
    return Check(name, True, f"freed between rollouts, {how}; {weights}")
