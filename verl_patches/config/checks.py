"""The rules that a configuration must keep before anything starts: layouts, sizes, batches, lengths, memory.

Each rule is one `Check` with what was expected and found, so that a plan can show all of them. Messages name the
upstream place that would refuse the configuration, or the figure that would be wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from verl_patches.batches import limits
from verl_patches.config import ascend, hccl
from verl_patches.config.algorithm import (
    critic_checks,
    estimator_checks,
    keep_groups_checks,
    objective_checks,
    reward_checks,
    reward_model_checks,
    validates,
)
from verl_patches.config.compose import (
    graph_arguments,
    hf_config_of,
    model_shape_of,
    rollout_library,
    shape_file,
    switched_off,
    vllm_arguments,
)
from verl_patches.config.environment import DROPPED, derive
from verl_patches.config.files import check_files, disk_detail, disk_fault, disk_needs
from verl_patches.config.recipe import PROFILED, VLLM_DTYPES
from verl_patches.config.run_start import NextStart, checkpoints_of, planned_start
from verl_patches.errors import Check, ConfigError, divides, either, fault_of
from verl_patches.layout.inventory import ModelShape, build_inventory, differences, read_model_shape
from verl_patches.layout.model_folder import read_json_object
from verl_patches.layout.parallel import (
    ParallelLayout,
    critic_of,
    rollout_layout_of,
    train_layout_of,
    trained_of,
    world_size,
)
from verl_patches.layout.phases import STEP_PHASES, reward_models, samples
from verl_patches.log_probs import on_policy, truth_check
from verl_patches.log_probs.of_rollout import CHECK_TOKENS
from verl_patches.memory.schedule import OF_ROLLOUT, sleeps_by_vllm
from verl_patches.model.mindspeed.arguments import ONLY
from verl_patches.reshard.blocks import Block, make_blocks
from verl_patches.upstream.checkouts import LINE, Trees
from verl_patches.upstream.support import refusal, refused_keys, shell_findings
from verl_patches.values import Count, Positive, value_faults

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
GRAPH_MINUTES = 0.5, 1.5  # to compile one, by vllm-ascend's own message (worker/model_runner_v1.py:1975)
_RECOMPUTED = "granularity", "method", "num_layers"
_SIZES = "tensor_model pipeline_model virtual_pipeline_model context expert_model expert_tensor".split()


def check_config(
    config: DictConfig, must_exist: Collection[str] = (), trees: Trees | None = None, start: NextStart | None = None
) -> list[Check]:
    """All rules in order. A layout that cannot be built is a failed check, and the rules that need it are left out.

    must_exist: those keys of files.PATHS whose files are expected on this machine; absent files of others are a note.
    trees: those that the run imports from; None: the user's code is not imported. start: where the run would start,
    where it is known already.
    """
    model = model_shape_of(config)
    checks, layouts = [], []
    start, no_start = planned_start(config) if start is None else (start, "")
    for name, build in (("train layout", train_layout_of), ("rollout layout", rollout_layout_of)):
        fault = fault_of(build, config)
        layouts.append(None if fault else build(config))
        checks.append(Check(name, not fault, fault or str(layouts[-1])))
    train, rollout = layouts
    checks += [*check_files(config, must_exist, trees), *_model_checks(config, model)]
    if train:
        checks += [*_train_checks(config, train, model), *_checkpoint_checks(config, train, start, no_start)]
        checks += reward_model_checks(config, train)
    sampled = samples(config.recipe)
    if rollout and sampled:
        checks += [*_rollout_checks(config, rollout, model), *ascend.checks(config, model), _sleep_check(config)]
    if train and rollout:
        checks += _batch_checks(config, train, rollout)
        checks += _sync_checks(config, train, rollout, model) if sampled else ()
    checks += [*_length_checks(config), *estimator_checks(config), *objective_checks(config), *_line_checks(config)]
    checks += [*_on_policy_checks(config), *_truth_check_checks(config)]
    checks += [Check("tensor cache", False, fault) for fault in limits.faults(config)]
    checks += [Check("micro batch", False, fault) for fault in limits.budget_faults(config)]
    checks += [*_swap_checks(config), check_disk(config, start), *_replay_checks(config), *reward_checks(config)]
    checks += keep_groups_checks(config)
    return [*checks, *hccl.checks(config, model), *_profile_checks(config), *_restart_checks(config)]


def check_disk(config: DictConfig, start: NextStart, starts: bool = False) -> Check:
    """Whether what the run writes from `start` on fits on this machine's disks; a note but where it `starts` here."""
    needs = disk_needs(config, start)
    fault = disk_fault(needs)
    return Check("disk", not (fault and starts), fault or disk_detail(needs), note=fault is not None and not starts)


# the model


_HF_NUMBERS = {  # keys of config.json that training reads beside the sizes of layout/inventory.py
    "rope_theta": Positive,
    "rms_norm_eps": Positive,
    "max_position_embeddings": Count,
    "routed_scaling_factor": Positive | None,
    "initializer_range": Positive | None,
    "n_group": Count | None,
    "topk_group": Count | None,
    "rope_scaling": dict[str, Any] | None,
}


def _model_checks(config: DictConfig, model: ModelShape) -> Iterator[Check]:
    """What verl's converter and MindSpeed-LLM take for granted in a DeepSeek-V3's config.json; others train wrongly.

    Its sizes are those of `model`, which all else is planned with.
    """
    hf = hf_config_of(config)
    faults = value_faults(_HF_NUMBERS, {key: hf.get(key) for key in _HF_NUMBERS})
    for key, expected, _ in ONLY:
        if hf.get(key) is not None and hf[key] != expected:
            faults.append(f"{key} is {hf[key]!r}; expected {expected!r}")
    if not hf.get("n_shared_experts"):
        faults.append(f"n_shared_experts is {hf.get('n_shared_experts')!r}; expected at least 1")
    experts, groups, chosen = (hf.get(key) for key in ("n_routed_experts", "n_group", "topk_group"))
    if not faults and groups and chosen and (experts % groups or chosen > groups):
        faults.append(f"n_group is {groups} and topk_group {chosen}; expected a divisor of {experts}, and 1 to n_group")
    if not faults:
        try:
            found = replace(read_model_shape(hf), torch_dtype=model.torch_dtype)
            faults += [unlike] if (unlike := differences(found, model)) else []
        except ConfigError as error:
            faults.append(str(error))
    where = "the model's config.json, with actor_rollout_ref.model.override_config.model_config over it"
    detail = f"{'; '.join(faults)} ({where}): this model cannot be trained" if faults else "a DeepSeek-V3"
    yield Check("model config", not faults, detail)


# layouts


def _train_checks(config: DictConfig, train: ParallelLayout, model: ModelShape) -> Iterator[Check]:
    actor, layers, heads = config.actor_rollout_ref.actor.megatron, model.num_hidden_layers, model.num_attention_heads
    fault = fault_of(train.chunk_layers, layers)
    if config.recipe.line == LINE and not fault:
        fault = _fault_of_stages(train, model)
    yield Check("layers", not fault, fault or f"{layers} layers over {train.pp} stage(s) x {train.vpp} chunk(s)")
    yield _experts("train experts", train.ep, model.n_routed_experts, f"{_ACTOR}.expert_model_parallel_size")
    key = f"{_ACTOR}.tensor_model_parallel_size or context_parallel_size (Ulysses exchanges heads)"
    yield divides("attention heads", heads, train.tp * train.cp, key, "heads a rank")
    keys = [f"{name}_parallel_size" for name in _SIZES]
    others = {
        "ref": config.actor_rollout_ref.ref,
        "critic": critic_of(config),
        "reward model": config.reward_model if reward_models(config.recipe) else None,
    }
    for name, other in ((name, section.megatron) for name, section in others.items() if section is not None):
        unequal = [f"{key} {actor[key]} != {other[key]}" for key in keys if actor[key] != other[key]]
        fault = (
            f"expected actor and {name} to share one layout, as verl initializes Megatron once per process "
            f"(megatron_workers.py:88); found {', '.join(unequal)}"
        )
        yield either(f"actor = {name}", not unequal, "one layout", fault)
    whole = f"experts are whole, {train.ep} ranks share them"
    split = f"each expert is split over {train.etp} ranks, as tp"
    fault = fault_of_experts(train)
    yield Check("experts under tp", fault is None, fault or (whole if train.etp == 1 else split))
    yield from (Check("recomputation", False, fault) for fault in faults_of_recomputation(config))
    if config.recipe.train.expert_split == "tp_extend_ep":
        held = f"ep {train.ep} = tp {train.tp} x MindSpeed ep {train.ep // train.tp}, whole experts"
        fault = (
            "expected expert_tensor_parallel_size 1 and expert_model_parallel_size a multiple of tp "
            f"{train.tp}; found {train.etp} and {train.ep}"
        )
        yield either("recipe.train.expert_split", train.etp == 1 and train.ep % train.tp == 0, held, fault)


def _fault_of_stages(train: ParallelLayout, model: ModelShape) -> str | None:
    """Why an update on line a3 would not end with these stages; None where it would."""
    layers = [train.stage_layers(stage, model.num_hidden_layers) for stage in range(train.pp)]
    dense = [stage for stage, held in enumerate(layers) if not any(map(model.is_moe, held))]
    if train.ep == 1 or not dense:
        return None
    return (
        f"stage {', '.join(map(str, dense))} has no layer with experts; expected one in each, as Megatron core_r0.8.0 "
        "reduces the norms of dense and of expert gradients over all ranks one after the other (optimizer.py:994), and "
        f"this stage would not join the second: more than {model.first_k_dense_replace} layers on the first stage"
    )


def fault_of_experts(train: ParallelLayout) -> str | None:
    """Why Megatron would compute wrong expert outputs in this training layout; None where it would not."""
    if train.tp == 1 or train.ep > 1 or train.etp > 1:
        return None
    return (
        f"expected ep > 1 or etp = tp at tp {train.tp}: "
        "with ep 1 and etp 1 Megatron adds up expert outputs of different tokens over TP ranks"
    )


def faults_of_recomputation(config: DictConfig) -> Iterator[str]:
    """Where Megatron's loop over layers (transformer_block.py, _checkpointed_forward) would go on in steps of 0."""
    for name, section in {"actor_rollout_ref": config.actor_rollout_ref, "critic": critic_of(config)}.items():
        if section is None or not section.model.enable_gradient_checkpointing:
            continue
        given = section.model.get("gradient_checkpointing_kwargs") or {}
        kind, method, number = (given.get(f"activations_checkpoint_{key}") for key in _RECOMPUTED)
        if kind == "full" and method != "block" and number == 0:
            yield (
                f"{name}.model: activations_checkpoint_num_layers=0 needs activations_checkpoint_method=block, or the "
                "forward pass would not end; or set enable_gradient_checkpointing=false"
            )


def _checkpoint_checks(config: DictConfig, train: ParallelLayout, start: NextStart, no_start: str) -> Iterator[Check]:
    """Whether the run can save and resume; none where it does neither, or without experts to lose as verl does."""
    trainer, ours = config.trainer, ("checkpoint.parts", "checkpoint.save", "checkpoint.load")
    off = [row for row in ours if switched_off(config, row)]
    for name, section in trained_of(config).items():
        if not section.megatron.get("use_distributed_optimizer", True):
            fault = f"{name}.megatron.use_distributed_optimizer is false, expected true"
            yield Check("optimizer", False, f"{fault}: each rank offloads and saves its own states")
    if (trainer.save_freq <= 0 and trainer.resume_mode == "disable") or (len(off) == len(ours) and train.ep == 1):
        return
    faults = []
    if off:
        text = "verl saves the model on data-parallel rank 0 only (megatron_checkpoint_manager.py:236), experts of all"
        faults.append(f"rows {', '.join(off)} are off: {text} others would be lost; expected all of {', '.join(ours)}")
    if trainer.get("default_hdfs_dir"):
        faults.append("trainer.default_hdfs_dir is set, expected null: files go to trainer.default_local_dir only")
    held = f"in {checkpoints_of(config)}, which all nodes must share"
    held += f"; goes on from {start.resumed}" if start.resumed else ""
    faults += [no_start] if no_start else []
    yield Check("checkpoints", not faults, "; ".join(faults) or held, note=not faults)


def _rollout_checks(config: DictConfig, rollout: ParallelLayout, model: ModelShape) -> Iterator[Check]:
    engine, recipe = vllm_arguments(config), config.recipe.rollout
    experts, heads = model.n_routed_experts, model.num_attention_heads
    if rollout.ep <= experts and experts % rollout.ep:
        held, last = experts // rollout.ep, experts - (rollout.ep - 1) * (experts // rollout.ep)
        yield Check("rollout experts", True, f"{held} of {experts} experts a rank, {last} on the last")
    else:
        keys = "recipe.rollout.dp or rollout.tensor_model_parallel_size"
        yield _experts("rollout experts", rollout.ep, experts, keys)
    yield divides("rollout heads", heads, rollout.tp, f"{_ROLLOUT}.tensor_model_parallel_size", "heads a rank")
    wanted = {"enable_expert_parallel": recipe.expert_parallel, "data_parallel_size": recipe.dp}
    found = {key: engine.get(key) for key in wanted}
    unequal = [f"{key} is {found[key]}, expected {wanted[key]}" for key in wanted if found[key] != wanted[key]]
    fault = f"{'; '.join(unequal)}: set recipe.rollout, the engine's arguments follow it"
    yield either("engine_kwargs.vllm", not unequal, "agrees with recipe.rollout", fault)
    if recipe.expert_parallel and rollout.ep == 1:
        text = (
            "recipe.rollout.expert_parallel needs rollout.tensor_model_parallel_size x recipe.rollout.dp > 1; "
            "found 1 rank an instance, where vLLM ignores it"
        )
        yield Check("expert parallel", False, text)


def _experts(name: str, ep: int, experts: int, key: str) -> Check:
    fault = (
        f"{experts} routed experts over {ep} ranks: expected a divisor of {experts}, at most {experts}; change {key}"
    )
    fits = ep <= experts and experts % ep == 0
    return either(name, fits, f"{experts // ep} of {experts} experts a rank", fault)


# batches and lengths


def _batch_checks(config: DictConfig, train: ParallelLayout, rollout: ParallelLayout) -> Iterator[Check]:
    actor, prompts, n = config.actor_rollout_ref.actor, config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    if samples(config.recipe):
        key = "data.train_batch_size (verl hands each rank an equal share of the prompts)"
        yield divides("prompts", prompts, rollout.world_size, key, "prompts a rank")
    key = "data.train_batch_size or rollout.n (train data-parallel ranks)"
    yield divides("responses", prompts * n, train.dp, key, "responses a train replica")
    for name, section in trained_of(config).items():
        mini, micro = section.ppo_mini_batch_size, section.ppo_micro_batch_size_per_gpu
        key = f"{name}.ppo_mini_batch_size (must divide data.train_batch_size)"
        yield divides(f"{name} mini batch", prompts, mini, key, "mini batches a step")
        key = f"{name}.ppo_mini_batch_size (responses of a mini batch over train dp)"
        yield divides(f"{name} mini batch share", mini * n, train.dp, key, "responses of a mini batch a train replica")
        key = f"{name}.ppo_micro_batch_size_per_gpu"
        if not section.use_dynamic_bsz and micro is None:
            yield Check(f"{name} micro batch", False, f"{key} is null; verl needs it without use_dynamic_bsz")
        elif not section.use_dynamic_bsz:
            key += " (responses a rank and mini batch)"
            yield divides(f"{name} micro batch", mini * n // train.dp, micro, key, "micro batches of a mini batch")
    reference = actor.use_kl_loss or config.algorithm.use_kl_in_reward
    old = {"actor": "ppo_micro_batch_size", "rollout": "log_prob_micro_batch_size", "ref": "log_prob_micro_batch_size"}
    for name, key in old.items():  # verl takes either (RayPPOTrainer._validate_config)
        given = config.actor_rollout_ref[name][key] is not None and (name != "ref" or reference)
        if given and not actor.use_dynamic_bsz:
            text = f"actor_rollout_ref.{name}.{key} is given; set {key}_per_gpu alone, which plans read"
            yield Check(f"{name} micro batch", False, text)
    passes = {"rollout": not config.recipe.train.skip_old_log_prob, "ref": reference}
    for name in (name for name, runs in passes.items() if runs):
        section = config.actor_rollout_ref[name]
        micro, key = section.log_prob_micro_batch_size_per_gpu, f"{name}.log_prob_micro_batch_size_per_gpu"
        if micro is not None and not section.get("log_prob_use_dynamic_bsz"):  # verl 0.4.0 has that key
            yield divides(f"{name} micro batch", prompts * n // train.dp, micro, key, "micro batches of a step")
    yield from critic_checks(config)
    seats = vllm_arguments(config).get("max_num_seqs")
    if seats is None or not samples(config.recipe):
        return
    budget = config.actor_rollout_ref.rollout.max_num_batched_tokens
    responses = math.ceil(prompts * n / (rollout.world_size // rollout.tp))
    held = f"{responses} responses a replica, {seats} at once, within max_num_batched_tokens {budget}"
    fault = held.replace("within", "expected <=") + " (vLLM's SchedulerConfig refuses more)"
    yield either("max_num_seqs", seats <= budget, held, fault)
    running = seats if validates(config) else min(responses, seats)  # a validation may have more responses
    sizes = graph_arguments(config).get("graph_batch_sizes") or ()
    if sizes:
        decoded = f"the {running} responses that a replica decodes at once"
        fault = f"largest graph {max(sizes)}, expected at least {decoded}; "
        fault += "add it to recipe.rollout.ascend.graph_batch_sizes or lower max_num_seqs"
        held = f"graphs of {', '.join(map(str, sizes))}: the largest holds {decoded}; "
        least, most = (minutes * len(sizes) for minutes in GRAPH_MINUTES)
        held += f"{least:g} to {most:g} minutes to compile at the start"
        yield either("graph batch sizes", max(sizes) >= running, held, fault)


def _length_checks(config: DictConfig) -> Iterator[Check]:
    rollout, data, path = config.actor_rollout_ref.rollout, config.data, shape_file(config)
    longest = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    budget, reach = rollout.max_num_batched_tokens, read_json_object(path).get("max_position_embeddings")
    if not isinstance(reach, int):
        raise ConfigError(f"{path}: expected max_position_embeddings, a whole number, found {reach!r}")
    asked = data.max_prompt_length + data.max_response_length
    if longest < asked:
        text = f"{_ROLLOUT}.max_model_len is {longest}; expected at least prompt + response, {asked}"
        yield Check("lengths", False, text)
    held = f"prompt + response {longest} tokens, model reaches {reach}"
    yield either("lengths", longest <= reach, held, f"{held}; expected no more")
    held = f"max_num_batched_tokens {budget} holds prompt + response {longest}"
    fault = f"max_num_batched_tokens {budget}, expected >= {longest}: "
    if rollout.enable_chunked_prefill:
        fault += (
            "verl refuses chunked prefill below it (vllm_rollout_spmd.py); "
            "vLLM V1 prefills in chunks anyway, so leave enable_chunked_prefill false"
        )
        yield either("chunked prefill", budget >= longest, held, fault)
    elif config.recipe.platform == "cpu":
        yield either("prefill", budget >= longest, held, fault + "engine V0 prefills whole prompts")
    mode = "graph"
    fault = "expected free_cache_engine=false with enforce_eager=false: verl refuses both (vllm_rollout_spmd.py)"
    if rollout.enforce_eager:
        mode = "eager"
        fault = (
            "expected free_cache_engine=true with enforce_eager=true: the engine sleeps after each rollout, "
            "with both values of the key"
        )
    yield either("graph mode", bool(rollout.enforce_eager) == bool(rollout.free_cache_engine), mode, fault)


# what the line, the recipe and the switches allow


def _line_checks(config: DictConfig) -> Iterator[Check]:
    """What the pin file says that the line cannot do; a planned key is a note: a dry run is allowed, a start is not."""
    line = config.recipe.line
    for entry, value in refused_keys(config):
        text = refusal(entry, value, line)
        planned = f"a start is refused: {text}"
        yield Check(f"line {line}", entry.planned, planned if entry.planned else text, note=entry.planned)
    decided = {*DROPPED, *(variable.name for variable in derive(config) if variable.where != "node")}
    for finding in shell_findings(line, decided=decided):
        if finding.state == "problem":
            text = f"{finding.name} is {finding.found}, expected {finding.expected}; {finding.todo}"
            yield Check("environment", False, text)


def _on_policy_checks(config: DictConfig) -> list[Check]:
    faults = on_policy.faults(config, hf_config_of(config))
    for row in ("update.on_policy", "update.loss_on_policy"):
        if config.recipe.train.importance_ratio == "sequence" and switched_off(config, row):
            faults.append(f"recipe.train.importance_ratio is sequence, but row {row} is off; switch it on")
    if config.recipe.train.skip_old_log_prob and not faults:
        return [Check("on policy", True, "no pass for old log-probs: one mini batch and one epoch an update")]
    return [Check("on policy", False, fault) for fault in faults]


def _truth_check_checks(config: DictConfig) -> list[Check]:
    """Whether and when the run compares log-probs; a note where it never does."""
    if faults := list(truth_check.faults(config)):
        return [Check("truth check", False, fault) for fault in faults]
    if reason := truth_check.not_compared(config):
        return [Check("truth check", True, f"log-probs are never compared: {reason}", note=True)]
    every = config.recipe.logprob_check.every
    if every is None:
        return [Check("truth check", True, "all sampled tokens of every step")]
    text = f"from step 1 every {every}: {truth_check.sequences_of(config)} x {CHECK_TOKENS} tokens"
    return [Check("truth check", True, text)]


def _swap_checks(config: DictConfig) -> Iterator[Check]:
    """On line pypi only: line a3 has rules of its own in model/mindspeed/arguments.py."""
    train, actor = config.recipe.train, config.actor_rollout_ref.actor.megatron
    if config.recipe.line != "pypi" or not train.swap_optimizer:
        return
    held = f"states come in {train.swap_optimizer_times} pieces, or one tensor at a time"
    fault = "the states are on the host already: set actor.megatron.optimizer_offload=false"
    yield either("swap optimizer", not actor.optimizer_offload, held, fault)


def _replay_checks(config: DictConfig) -> Iterator[Check]:
    """recipe.train.routing_replay: whether a pass records, and its routers are those that select."""
    key, recipe = "recipe.train.routing_replay", config.recipe
    if recipe.train.routing_replay is None:
        return
    faults = []
    if recipe.train.skip_old_log_prob:
        faults.append("recipe.train.skip_old_log_prob leaves out the pass that records; set it false")
    if not recipe.train.use_remove_padding:
        faults.append("recipe.train.use_remove_padding is false: tokens are those of packed sequences; set it true")
    if recipe.train.balanced_routing:
        faults.append("recipe.train.balanced_routing ignores the router; set one of them")
    selection = "update.routing_replay" if recipe.line == "pypi" else "update.routing_replay_mindspeed"
    for row in ("update.recipe_worker", "update.routing_samples", selection):
        if switched_off(config, row):
            faults.append(f"row {row} is off; remove -{row} from recipe.patches")
    held = "the update selects the experts of the pass for old log-probs"
    yield either("routing replay", not faults, held, f"{key} is R2, but {'; '.join(faults)}")


def _sync_checks(
    config: DictConfig, train: ParallelLayout, rollout: ParallelLayout, model: ModelShape
) -> Iterator[Check]:
    """Whether the direct weight sync can serve this pair of layouts with these buckets; none where its row is off."""
    if switched_off(config, "reshard.direct"):
        return
    fault = fault_of(sync_blocks, config, train, rollout, model)
    yield Check("weight sync", not fault, fault or "every rank can receive the weights that it lacks")


def sync_blocks(
    config: DictConfig, train: ParallelLayout, rollout: ParallelLayout, model: ModelShape
) -> Sequence[Block]:
    """The blocks of the run's weight sync (reshard/blocks.py); ConfigError where `train` cannot serve `rollout`."""
    recipe = config.recipe
    libraries = "mindspeed" if recipe.line == "a3" else "megatron-local", rollout_library(config)
    model = replace(model, torch_dtype=VLLM_DTYPES[recipe.dtype])
    return _blocks(model, train, rollout, libraries, recipe.reshard.bucket_bytes)


@functools.lru_cache(8)  # one command reads those of its configuration more than once
def _blocks(
    model: ModelShape, train: ParallelLayout, rollout: ParallelLayout, libraries: tuple[str, str], bucket_bytes: int
) -> Sequence[Block]:
    """`libraries` are those of training and rollout."""
    names = dict(zip(("train_library", "rollout_library"), libraries, strict=True))
    return make_blocks(build_inventory(model), train, rollout, **names, bucket_bytes=bucket_bytes)


def _sleep_check(config: DictConfig) -> Check:
    """What the rollout engine's sleep does with its weights (memory/sleep_mode.py)."""
    name, recipe = "rollout memory", config.recipe
    own_sleep_off = switched_off(config, "memory.sleep_mode")
    graphs = not config.actor_rollout_ref.rollout.enforce_eager
    if recipe.platform == "cpu" and (own_sleep_off or graphs):
        expected = []
        if own_sleep_off:
            expected.append("recipe.patches without -memory.sleep_mode")
        if graphs:
            expected.append("actor_rollout_ref.rollout.enforce_eager=true (graphs keep the addresses they captured)")
        return Check(name, False, f"vLLM has no sleep mode on a CPU; expected {', '.join(expected)}")
    if graphs and not recipe.rollout.ascend.vllm_sleep_mode:
        rows = [row for row in ("memory.sleep_mode", "memory.graph_addresses") if switched_off(config, row)]
        cached = graph_arguments(config).get("use_cached_graph")
        if rows or cached:
            found = f"row {', '.join(rows)} is off" if rows else "use_cached_graph is set, whose graphs no row changes"
            text = "expected true: graphs would read weights where they were before sleep"
            return Check(name, False, f"recipe.rollout.ascend.vllm_sleep_mode is false and {found}; {text}")
    no_pages = "no expandable segments, and on several nodes it may free nothing (docs/memory.md)"
    if own_sleep_off:
        text = f"row memory.sleep_mode is off: vLLM copies all weights to the host; {no_pages}"
        return Check(name, True, text, note=True)
    if sleeps_by_vllm(config.actor_rollout_ref.rollout, recipe):
        text = f"freed by vLLM's sleep mode, which keeps the addresses that graphs captured; {no_pages}"
        return Check(name, True, text, note=True)
    return Check(name, True, "freed between rollouts, to torch's pool")


# sections of the recipe


def _profile_checks(config: DictConfig) -> Iterator[Check]:
    """recipe.profile: numbers of steps and ranks that the run has; nothing where it is off."""
    section = config.recipe.profile
    if section.steps is None:
        return
    faults = list(_profile_faults(section, world_size(config), config))
    yield from (Check("profile", False, fault) for fault in faults)
    if not faults:
        phases = ", ".join(section.phases or [phase for phase in PROFILED if phase not in _without(config)])
        yield Check("profile", True, f"steps {list(section.steps)}, ranks {list(section.ranks)}: {phases}")


def _without(config: DictConfig) -> set[str]:
    """Phases that the run does not have: of a critic, of reward models, of a rollout."""
    absent = {phase.planned for phase in STEP_PHASES if phase.critic and critic_of(config) is None}
    absent |= set() if reward_models(config.recipe) else {"rm_scores"}
    return absent if samples(config.recipe) else {*absent, *OF_ROLLOUT}


def _profile_faults(section: DictConfig, world: int, config: DictConfig) -> Iterator[str]:
    key, last = "recipe.profile", config.trainer.total_training_steps
    for name in ("steps", "ranks"):
        if not section[name]:
            yield f"{key}.{name} is empty, so nothing is profiled; expected numbers, or {key}.steps=null"
    for rank in section.ranks:
        if rank >= world:
            yield f"{key}.ranks: {rank} is no rank; the run has ranks 0 to {world - 1}"
    for step in section.steps:
        if last is not None and step > last:
            yield f"{key}.steps: {step} comes after the last step, {last} (trainer.total_training_steps)"
    if absent := _without(config).intersection(section.phases or ()):
        yield f"{key}.phases: the run has no {', '.join(sorted(absent))}, by its algorithm and rewards"
    if config.recipe.train.skip_old_log_prob and "old_log_prob" in (section.phases or ()):
        yield f"{key}.phases: the run has no old_log_prob, as recipe.train.skip_old_log_prob is true"


def _restart_checks(config: DictConfig) -> Iterator[Check]:
    """recipe.restart: a restart finds a checkpoint, and nodes to leave out; none where nothing is restarted."""
    restart, trainer = config.recipe.restart, config.trainer
    if restart.without_nodes and config.recipe.ray_address is None:
        text = "recipe.restart.without_nodes is for a joined Ray; set recipe.ray_address, or remove it"
        yield Check("restart", False, text)
    if not restart.times:
        return
    faults = []
    if trainer.save_freq < 1:
        faults.append(f"trainer.save_freq is {trainer.save_freq}, so there is no checkpoint; set it to 1 or more")
    if trainer.resume_mode != "auto":
        faults.append(f"trainer.resume_mode is {trainer.resume_mode}; expected auto, which takes the newest checkpoint")
    held = f"at most {restart.times} times, from the newest checkpoint"
    yield either("restart", not faults, held, f"recipe.restart.times is {restart.times}, but {'; '.join(faults)}")
