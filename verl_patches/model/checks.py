"""Check the model's config.json, and how training splits the model over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from verl_patches.errors import Check, ConfigError, config_error_text, divides, either
from verl_patches.layout.inventory import ModelShape, first_layers, read_model_shape, size_differences
from verl_patches.layout.model_folder import config_mismatches, read_config
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.model.mindspeed.arguments import engine_settings
from verl_patches.spec import A3, RunSpec

_ACTOR = "actor_rollout_ref.actor.megatron"
_PARALLEL_SIZES = "tensor_model pipeline_model virtual_pipeline_model context expert_model expert_tensor".split()
_RECOMPUTE_KEYS = "granularity", "method", "num_layers"


def model_checks(run: RunSpec) -> Iterator[Check]:
    """Check that config.json holds what verl's converter and MindSpeed-LLM assume of a DeepSeek-V3.

    A model with other values would train wrongly. Its sizes must equal those of recipe.model_shape.
    """
    model, hf = run.model, run.hf_config
    fault = config_mismatches(hf)
    if not fault:
        try:
            fault = size_differences(replace(read_model_shape(hf), torch_dtype=model.torch_dtype), model)
        except ConfigError as error:
            fault = str(error)
    where = "the model's config.json, changed by actor_rollout_ref.model.override_config.model_config"
    yield either("model config", not fault, "a DeepSeek-V3 model", f"{fault} ({where}): this model cannot be trained")


def train_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the training layout can split layers, experts and attention heads, and is the same for every model."""
    train, model = run.train, run.model
    yield Check("train layout", True, str(train))
    actor, layers, heads = run.verl.actor_rollout_ref.actor.megatron, model.num_hidden_layers, model.num_attention_heads
    fault = config_error_text(train.chunk_layers, layers)
    if run.line == A3 and not fault:
        fault = _stage_fault(train, model)
    yield Check("layers", not fault, fault or f"{layers} layers over {train.pp} stage(s) x {train.vpp} chunk(s)")
    yield experts_check("train experts", train.ep, model.n_routed_experts, f"{_ACTOR}.expert_model_parallel_size")
    key = f"{_ACTOR}.tensor_model_parallel_size or context_parallel_size (Ulysses exchanges heads)"
    yield divides("attention heads", heads, train.tp * train.cp, key, "heads a rank")
    keys = [f"{name}_parallel_size" for name in _PARALLEL_SIZES]
    others = {
        "ref": run.verl.actor_rollout_ref.ref,
        "critic": run.critic,
        "reward model": run.verl.reward_model if run.reward_models else None,
    }
    for name, section in others.items():
        if section is None:
            continue
        other = section.megatron
        unequal = [f"{key} {actor[key]} != {other[key]}" for key in keys if actor[key] != other[key]]
        fault = (
            f"expected actor and {name} to share one layout, as verl initializes Megatron once per process "
            f"(verl.workers.megatron_workers.ActorRolloutRefWorker.__init__); found {', '.join(unequal)}"
        )
        yield either(f"actor = {name}", not unequal, "one layout", fault)
    if run.recipe.train.expert_split == "tp_extend_ep":
        detail = f"ep {train.ep} = tp {train.tp} x MindSpeed ep {train.ep // train.tp}, whole experts"
        fault = (
            "expected expert_tensor_parallel_size 1 and expert_model_parallel_size a multiple of tp "
            f"{train.tp}; found {train.etp} and {train.ep}"
        )
        yield either("recipe.train.expert_split", train.etp == 1 and train.ep % train.tp == 0, detail, fault)


def _stage_fault(train: ParallelLayout, model: ModelShape) -> str | None:
    """Return why an update on line a3 would hang with these pipeline stages, None where it would not."""
    layers = [train.stage_layers(stage, model.num_hidden_layers) for stage in range(train.pp)]
    dense = [stage for stage, layer_ids in enumerate(layers) if not any(map(model.is_moe, layer_ids))]
    if train.ep == 1 or not dense:
        return None
    return (
        f"pipeline stage {', '.join(map(str, dense))} has no layer with experts; expected one on each stage. Megatron "
        "core_r0.8.0 reduces the norms of dense and then of expert gradients over all ranks "
        "(megatron.core.optimizer.optimizer.ChainedOptimizer.step); without experts a stage skips the second "
        f"reduction, and the update hangs. Put more than {model.first_k_dense_replace} layers on the first stage"
    )


def expert_checks(run: RunSpec) -> Iterator[Check]:
    """Refuse a training layout in which Megatron would compute wrong expert outputs."""
    train = run.train
    detail = f"experts are whole, {train.ep} ranks share them"
    if train.etp > 1:
        detail = f"each expert is split over {train.etp} ranks, as tp"
    fault = (
        f"expected ep > 1 or etp = tp at tp {train.tp}: "
        "with ep 1 and etp 1 Megatron sums expert outputs of different tokens over TP ranks"
    )
    yield either("experts under tp", train.tp == 1 or train.ep > 1 or train.etp > 1, detail, fault)


def recomputation_checks(run: RunSpec) -> Iterator[Check]:
    """Refuse recomputation settings with which Megatron's loop over layers (_checkpointed_forward) steps by 0."""
    for name, section in {"actor_rollout_ref": run.verl.actor_rollout_ref, "critic": run.critic}.items():
        if section is None or not section.model.enable_gradient_checkpointing:
            continue
        kwargs = section.model.get("gradient_checkpointing_kwargs") or {}
        granularity, method, layers = (kwargs.get(f"activations_checkpoint_{key}") for key in _RECOMPUTE_KEYS)
        if granularity == "full" and method != "block" and layers == 0:
            fault = (
                f"{name}.model: activations_checkpoint_num_layers=0 needs activations_checkpoint_method=block, found "
                f"{method}: Megatron's loop over layers would never end. Set it, or enable_gradient_checkpointing=false"
            )
            yield Check("recomputation", False, fault)


def experts_check(name: str, ep: int, experts: int, key: str) -> Check:
    """Check that each of `ep` ranks holds equally many experts; `name` is the check's, `key` what a user changes."""
    fault = (
        f"{experts} routed experts over {ep} ranks: expected a divisor of {experts}, at most {experts}; change {key}"
    )
    fits = ep <= experts and experts % ep == 0
    return either(name, fits, f"{experts // ep} of {experts} experts a rank", fault)


def engine_checks(run: RunSpec) -> Iterator[Check]:
    """Check, on line a3, that the training engine refuses no key of the configuration and the model."""
    if run.line != A3:
        return
    rows = engine_settings(run.verl.actor_rollout_ref, run.recipe, run.hf_config)
    refused = [f"{row.key} is {row.value!r}: {row.why}" for row in rows if row.how == "refused"]
    yield from (Check("engine arguments", False, text) for text in refused)
    if not refused:
        detail = f"all {len(rows)} keys are supported; `config --explain` shows the argument of each"
        yield Check("engine arguments", True, detail)


# keys of config.json that change what a model computes but not its sizes
_COMPUTATION_KEYS = (
    "rms_norm_eps rope_theta rope_scaling routed_scaling_factor n_group topk_group norm_topk_prob scoring_func".split()
)


def value_model_differences(run: RunSpec, model: ModelShape, folder: Path) -> str:
    """Return the differences between a value model and the actor that training cannot have, "" where there are none.

    `folder` has the value model's config.json. Line a3 builds the layers of both from the actor's arguments, so there
    the keys that change no weight are compared too.
    """
    model = replace(first_layers(model, run.recipe.num_hidden_layers), torch_dtype=run.model.torch_dtype)
    if mismatches := size_differences(model, run.model):
        return mismatches
    own, actors = read_config(folder), run.hf_config
    if run.line != A3:
        return ""
    keys = [key for key in _COMPUTATION_KEYS if own.get(key) != actors.get(key)]
    return ", ".join(f"{key} {own.get(key)} != {actors.get(key)}" for key in keys)
