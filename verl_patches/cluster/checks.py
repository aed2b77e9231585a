"""Does a composed configuration describe a run that can exist? Both layouts, then every rule that would stop it.

Each rule is one `Check` with what was expected and found, so that a plan can show all of them; rules name the upstream
place that would refuse, or the number that would be wrong.
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

from verl_patches.cluster import hccl
from verl_patches.cluster.environment import DROPPED, derive
from verl_patches.cluster.model_files import config_file, hf_config_of, model_changes, model_shape_of, reads_weights
from verl_patches.cluster.recipe import VLLM_DTYPES
from verl_patches.cluster.support import refusal, refused_keys, shell_findings
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import ModelShape, build_inventory, read_model_shape
from verl_patches.layout.model_folder import QUANTIZATION, fp8_fault, weight_files
from verl_patches.layout.of_config import rollout_layout_of, train_layout_of
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.reshard.plan import servable_blocks
from verl_patches.rollout.log_probs import CHECK_TOKENS
from verl_patches.tensor_cache import limits
from verl_patches.trainer import truth_check
from verl_patches.trainer.on_policy import faults

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
          "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")


@dataclass(frozen=True)
class Check:
    """One rule: `detail` says what holds, or what was expected, found and to be changed.

    `note`: the rule does not fail a plan, but somebody should read it.
    """

    name: str
    ok: bool
    detail: str
    note: bool = False


def check_config(config: DictConfig, configs_dir: Path) -> list[Check]:
    """All rules in order. A layout that cannot be built is a failed check, and the rules that need it are left out."""
    checks: list[Check] = []
    model = model_shape_of(config, configs_dir)
    train = _built("train layout", lambda: train_layout_of(config), checks)
    rollout = _built("rollout layout", lambda: rollout_layout_of(config), checks)
    checks += _folder_checks(config, model) + _data_checks(config)
    if train:
        checks += _train_checks(config, train, model) + _checkpoint_checks(config, train)
    if rollout:
        checks += _rollout_checks(config, rollout, model)
    if train and rollout:
        checks += _batch_checks(config, train, rollout) + _sync_checks(config, train, rollout, model)
    checks += _length_checks(config, configs_dir) + _line_checks(config) + _on_policy_checks(config, configs_dir)
    checks += _truth_check_checks(config) + _tensor_cache_checks(config) + _swap_checks(config)
    checks += _sleep_mode_checks(config)
    return checks + [Check(*found) for found in hccl.checks(config, model)]


def _line_checks(config: DictConfig) -> list[Check]:
    """What the pin file says that the line cannot do; a planned key only shows, as a start is refused elsewhere."""
    line = config.recipe.line
    checks = [
        Check(f"line {line}", entry.planned, "a start is refused: " * entry.planned + refusal(entry, value, line),
              note=entry.planned)
        for entry, value in refused_keys(config)
    ]
    shell = shell_findings(line, decided={*DROPPED, *(v.name for v in derive(config) if v.where != "node")})
    checks += [
        Check("environment", False, f"{f.name} is {f.found}, expected {f.expected}; {f.todo}")
        for f in shell if f.state == "problem"
    ]
    return checks


def _on_policy_checks(config: DictConfig, configs_dir: Path) -> list[Check]:
    found = [Check("on policy", False, fault) for fault in faults(config, hf_config_of(config, configs_dir))]
    if config.recipe.train.skip_old_log_prob and not found:
        found.append(Check("on policy", True, "no pass for old log-probs: one mini batch and one epoch an update"))
    return found


def _tensor_cache_checks(config: DictConfig) -> list[Check]:
    return [Check("tensor cache", False, fault) for fault in limits.faults(config)]


def _truth_check_checks(config: DictConfig) -> list[Check]:
    found = [Check("truth check", False, fault) for fault in truth_check.faults(config)]
    section, sequences = config.recipe.logprob_check, truth_check.sequences_of(config)
    if section.every is None or found or section.action == "off":
        return found
    return [Check("truth check", True, f"from step 1 every {section.every}: {sequences} x {CHECK_TOKENS} tokens")]


def _checkpoint_checks(config: DictConfig, train: ParallelLayout) -> list[Check]:
    """Nothing to say where no checkpoint is asked for, or where one is whole."""
    every = config.trainer.save_freq
    return [Check("checkpoints", False, f"trainer.save_freq={every} with expert parallel size {train.ep}: verl saves "
                  "the model on data-parallel rank 0 only (megatron_checkpoint_manager.py:236), experts of all others "
                  "would be lost; expected trainer.save_freq=-1")] if every > 0 and train.ep > 1 else []  # fmt: skip


def _swap_checks(config: DictConfig) -> list[Check]:
    """Line a3 has its own say in training/engine_table.py."""
    train, actor = config.recipe.train, config.actor_rollout_ref.actor.megatron
    if config.recipe.line != "pypi" or not train.swap_optimizer:
        return []
    faults = []
    if actor.optimizer_offload:
        faults.append("the states are on the host already: set actor.megatron.optimizer_offload=false")
    if train.swap_optimizer_times < 1:
        faults.append(f"recipe.train.swap_optimizer_times is {train.swap_optimizer_times}, expected at least 1")
    said = "; ".join(faults) or f"states come in {train.swap_optimizer_times} pieces, or one tensor at a time"
    return [Check("swap optimizer", not faults, said)]


def _sync_checks(config: DictConfig, train: ParallelLayout, rollout: ParallelLayout, model: ModelShape) -> list[Check]:
    """Whether the resharder can serve this pair of layouts, with these buckets; nothing to say where it is off."""
    row = "reshard.direct"
    if _switched_off(config, row):
        return []
    model = replace(model, torch_dtype=VLLM_DTYPES[config.recipe.dtype])
    train_library = "mindspeed" if config.recipe.line == "a3" else "megatron-local"
    rollout_library = "vllm-ascend" if config.recipe.platform == "npu" else "vllm"
    served = functools.partial(_served, model, train, rollout, train_library, rollout_library,
                               config.recipe.reshard.bucket_bytes)  # fmt: skip
    return [_rule("weight sync", served, "each rank can be sent what it lacks")]


@functools.lru_cache(64)  # a command asks once for the launch and once for what it prints
def _served(
    model: ModelShape, train: ParallelLayout, rollout: ParallelLayout, train_library: str, rollout_library: str,
    bucket_bytes: int,
) -> None:  # fmt: skip
    """Raise ConfigError where the weights of `train` cannot be sent to `rollout`."""
    servable_blocks(build_inventory(model), train, rollout, train_library=train_library,
                    rollout_library=rollout_library, bucket_bytes=bucket_bytes)  # fmt: skip


def _switched_off(config: DictConfig, row: str) -> bool:
    asked = [pattern for pattern in config.recipe.patches if fnmatch.fnmatchcase(row, pattern[1:])]
    return bool(asked) and asked[-1].startswith("-")


def _sleep_mode_checks(config: DictConfig) -> list[Check]:
    """Whose sleep and wake the rollout engine has (memory/sleep_mode.py)."""
    rollout, recipe = config.actor_rollout_ref.rollout, config.recipe
    off, graphs = _switched_off(config, "memory.sleep_mode"), not rollout.enforce_eager
    if recipe.platform == "cpu" and (off or graphs):
        expected = ["recipe.patches without -memory.sleep_mode"] * off + [
            "actor_rollout_ref.rollout.enforce_eager=true (graphs keep the addresses that they captured)"] * graphs
        return [Check("rollout memory", False, f"no sleep mode of vLLM's on a CPU; expected {', '.join(expected)}")]
    if off:
        return [Check("rollout memory", True, "row memory.sleep_mode is off: vLLM copies all weights to the host")]
    direct = "reshard.direct"
    why = "" if recipe.weight_sync.enabled else "recipe.weight_sync.enabled is false"
    if _switched_off(config, direct):
        why = f"row {direct} is off and nothing proves that verl's own sync writes all of them"
    how = "by vLLM's sleep mode, for the addresses that graphs captured" if graphs else "into torch's pool"
    what = (f"weights {'are copied to the host' if graphs else 'stay'}, as {why}" if why
            else "what a weight sync writes is not copied" + ", but where anything else shares its segment" * graphs)
    return [Check("rollout memory", True, f"given back between rollouts, {how}; {what}")]


def _folder_checks(config: DictConfig, model: ModelShape) -> list[Check]:
    """The model that would run is the one that the plan is made from, in weights that it can read; where it is here."""
    checks, path = [], config_file(config)
    if QUANTIZATION in model_changes(config):
        checks.append(Check(
            "model folder", False,
            f"actor_rollout_ref.model.override_config.model_config holds {QUANTIZATION}; expected none: that of "
            "config.json is not read, and null ends rank 0, where verl prints it (configuration_utils.py:845)"))
    if not path.is_file():
        here = f"{path.parent} is not on this machine, its weights were not looked at; every node reads it"
        return [*checks, Check("model folder", True, f"{here} (actor_rollout_ref.model.path)", note=True)]
    found, key = read_model_shape(path), f"recipe.model_shape {config.recipe.model_shape}"
    text = "same model" if found == model else f"{path} describes another model than {key}: {found}, expected {model}"
    checks.append(Check("model shape", found == model, text))
    if reads_weights(config) and not weight_files(path.parent):
        said = f"{path.parent} has no safetensors file: whether its weights are bf16 is not known"
        checks.append(Check("model weights", True, said, note=True))
    elif reads_weights(config):
        fault = fp8_fault(path.parent)
        checks.append(Check("model weights", fault is None, fault or "none is stored in fp8"))
    return checks


def _data_checks(config: DictConfig) -> list[Check]:
    """Which data files are not on this machine; the node of the trainer reads them."""
    checks = []
    for key in ("train_files", "val_files"):
        files = config.data.get(key) or []
        absent = [file for file in ([files] if isinstance(files, str) else files) if not Path(file).exists()]
        if absent:
            said = f"{', '.join(absent)} is not on this machine; data/prepare_deepscaler.py makes it (data.{key})"
            checks.append(Check("data", True, said, note=True))
    return checks


def require(checks: Iterable[Check]) -> None:
    """ConfigError that lists every failed check; nothing if all hold."""
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.ok]
    if failed:
        raise ConfigError("the configuration describes no run that can exist:\n  " + "\n  ".join(failed))


def _built(name: str, build: Callable[[], ParallelLayout], checks: list[Check]) -> ParallelLayout | None:
    try:
        layout = build()
    except ConfigError as error:
        checks.append(Check(name, False, str(error)))
        return None
    checks.append(Check(name, True, str(layout)))
    return layout


def _train_checks(config: DictConfig, train: ParallelLayout, model: ModelShape) -> list[Check]:
    actor, ref = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.ref.megatron
    split = config.recipe.train.expert_split
    layers, experts = model.num_hidden_layers, model.n_routed_experts
    checks = [
        _rule(
            "layers",
            lambda: train.chunk_layers(layers),
            f"{layers} layers over {train.pp} stage(s) x {train.vpp} chunk(s)",
        ),
        _experts("train experts", train.ep, experts, "actor_rollout_ref.actor.megatron.expert_model_parallel_size"),
        _divides("attention heads", model.num_attention_heads, train.tp, f"{_ACTOR}.tensor_model_parallel_size",
                 "heads a rank"),
    ]
    unequal = [f"{key} {actor[key]} != {ref[key]}" for key in _SIZES if actor[key] != ref[key]]
    checks.append(Check(
        "actor = ref",
        not unequal,
        "expected actor and ref to share one layout, as verl starts Megatron once a process (megatron_workers.py:88); "
        f"found {', '.join(unequal)}"
        if unequal else "one layout",
    ))
    lone = fault_of_experts(train)
    checks.append(Check(
        "experts under tp",
        lone is None,
        lone if lone else f"experts are whole, {train.ep} ranks share them" if train.etp == 1 else
        f"each expert is split over {train.etp} ranks, as tp",
    ))
    if split == "tp_extend_ep":
        fits = train.etp == 1 and train.ep % train.tp == 0
        text = f"ep {train.ep} = tp {train.tp} x MindSpeed ep {train.ep // train.tp}, whole experts" if fits else (
            f"expected expert_tensor_parallel_size 1 and expert_model_parallel_size a multiple of tp {train.tp}; "
            f"found {train.etp} and {train.ep}"
        )
        checks.append(Check("recipe.train.expert_split", fits, text))
    return checks


def fault_of_experts(train: ParallelLayout) -> str | None:
    """Why Megatron would compute wrong expert outputs in this training layout; None where it would not."""
    if train.tp == 1 or train.ep > 1 or train.etp > 1:
        return None
    return (f"expected ep > 1 or etp = tp at tp {train.tp}: "
            "with ep 1 and etp 1 Megatron adds up expert outputs of different tokens over TP ranks")


def _rollout_checks(config: DictConfig, rollout: ParallelLayout, model: ModelShape) -> list[Check]:
    engine = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    recipe = config.recipe.rollout
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
        _divides("rollout heads", model.num_attention_heads, rollout.tp, f"{_ROLLOUT}.tensor_model_parallel_size",
                 "heads a rank"),
        Check(
            "engine_kwargs.vllm",
            not unequal,
            "; ".join(unequal) + ": set recipe.rollout, the engine's arguments follow it"
            if unequal else "agrees with recipe.rollout",
        ),
    ]
    if config.recipe.rollout.expert_parallel and rollout.ep == 1:
        checks.append(Check(
            "expert parallel",
            False,
            "recipe.rollout.expert_parallel needs rollout.tensor_model_parallel_size x recipe.rollout.dp > 1; "
            "found 1 rank an instance, where vLLM ignores it",
        ))
    return checks


def _batch_checks(config: DictConfig, train: ParallelLayout, rollout: ParallelLayout) -> list[Check]:
    actor, prompts, n = config.actor_rollout_ref.actor, config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini, micro = actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
    share = mini * n // train.dp
    checks = [
        _divides(
            "prompts",
            prompts,
            rollout.world_size,
            "data.train_batch_size (verl hands each rank an equal share of the prompts)",
            "prompts a rank",
        ),
        _divides("responses", prompts * n, train.dp, "data.train_batch_size or rollout.n (train data-parallel ranks)",
                 "responses a train replica"),
        _divides("mini batch", prompts, mini, "actor.ppo_mini_batch_size (must divide data.train_batch_size)",
                 "mini batches a step"),
        _divides(
            "mini batch share",
            mini * n,
            train.dp,
            "actor.ppo_mini_batch_size (responses of a mini batch over train dp)",
            "responses of a mini batch a train replica",
        ),
    ]
    if not actor.use_dynamic_bsz:
        if micro is None:
            checks.append(Check("micro batch", False, "actor.ppo_micro_batch_size_per_gpu is null; verl needs it "
                                "without use_dynamic_bsz"))
        else:
            checks.append(_divides(
                "micro batch",
                share,
                micro,
                "actor.ppo_micro_batch_size_per_gpu (responses a rank and mini batch)",
                "micro batches of a mini batch",
            ))
    seats = (config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}).get("max_num_seqs")
    if seats is not None:
        budget = config.actor_rollout_ref.rollout.max_num_batched_tokens
        running = math.ceil(prompts * n / (rollout.world_size // rollout.tp))
        checks.append(Check(
            "max_num_seqs",
            seats <= budget,
            f"{running} responses a replica, {seats} at once, "
            + (f"within max_num_batched_tokens {budget}" if seats <= budget else
               f"expected <= max_num_batched_tokens {budget} (vLLM's SchedulerConfig refuses more)"),
        ))
        checks += _graph_checks(config, min(running, seats))
    return checks


def _graph_checks(config: DictConfig, running: int) -> list[Check]:
    additional = config.actor_rollout_ref.rollout.engine_kwargs.vllm.get("additional_config") or {}
    extra = additional.get("torchair_graph_config") or {}
    sizes = list(extra.get("graph_batch_sizes") or ())
    if not extra.get("enabled") or not sizes:
        return []
    return [Check(
        "graph batch sizes",
        max(sizes) >= running,
        f"largest graph {max(sizes)} holds the {running} responses that a replica decodes at once"
        if max(sizes) >= running else
        f"largest graph {max(sizes)}, expected at least the {running} responses that a replica decodes at once; "
        "add it to graph_batch_sizes or lower max_num_seqs",
    )]


def _length_checks(config: DictConfig, configs_dir: Path) -> list[Check]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    longest = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    budget = rollout.max_num_batched_tokens
    reach = _max_positions(Path(configs_dir) / config.recipe.model_shape)
    checks = [Check(
        "lengths",
        longest <= reach,
        f"prompt + response {longest} tokens, model reaches {reach}" + "; expected no more" * (longest > reach),
    )]
    if rollout.enable_chunked_prefill:
        checks.append(Check(
            "chunked prefill",
            budget >= longest,
            f"max_num_batched_tokens {budget} holds prompt + response {longest}" if budget >= longest else
            f"max_num_batched_tokens {budget}, expected >= {longest}: "
            "verl refuses chunked prefill below it (vllm_rollout_spmd.py); "
            "vLLM V1 prefills in chunks anyway, so leave enable_chunked_prefill false",
        ))
    elif config.recipe.platform == "cpu":
        checks.append(Check(
            "prefill",
            budget >= longest,
            f"max_num_batched_tokens {budget} holds prompt + response {longest}" if budget >= longest else
            f"max_num_batched_tokens {budget}, expected >= {longest}: engine V0 prefills whole prompts",
        ))
    eager, free = bool(rollout.enforce_eager), bool(rollout.free_cache_engine)
    checks.append(Check(
        "graph mode",
        eager == free,
        ("eager" if eager else "graph") if eager == free else
        "expected free_cache_engine=true with enforce_eager=true: the engine sleeps after each rollout whatever it says"
        if eager else
        "expected free_cache_engine=false with enforce_eager=false: verl refuses both (vllm_rollout_spmd.py)",
    ))
    return checks


def _max_positions(path: Path) -> int:
    reach = json.loads(path.read_text()).get("max_position_embeddings")
    if not isinstance(reach, int):
        raise ConfigError(f"{path}: expected max_position_embeddings, a whole number, found {reach!r}")
    return reach


def _rule(name: str, run: Callable[[], object], fine: str) -> Check:
    try:
        run()
    except ConfigError as error:
        return Check(name, False, str(error))
    return Check(name, True, fine)


def _experts(name: str, ep: int, experts: int, key: str, rest_on_last: bool = False) -> Check:
    if rest_on_last and ep <= experts and experts % ep:
        last = experts - (ep - 1) * (experts // ep)
        return Check(name, True, f"{experts // ep} of {experts} experts a rank, {last} on the last")
    fits = ep <= experts and experts % ep == 0
    return Check(
        name,
        fits,
        f"{experts // ep} of {experts} experts a rank" if fits else
        f"{experts} routed experts over {ep} ranks: expected a divisor of {experts}, at most {experts}; change {key}",
    )


def _divides(name: str, whole: int, part: int, key: str, quotient: str) -> Check:
    fits = whole % part == 0
    return Check(
        name,
        fits,
        f"{whole} / {part} = {whole // part} {quotient}" if fits else
        f"{whole} is not a multiple of {part}; change {key}",
    )
