"""Options of vllm-ascend at its pin that are refused: what it would compute wrongly, or wait for without end."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_patches.config.compose import ascend_arguments, graph_arguments, hf_config_of, switched_off, vllm_arguments
from verl_patches.errors import Check, either
from verl_patches.layout.inventory import ModelShape
from verl_patches.layout.parallel import world_size
from verl_patches.platform import as_npu
from verl_patches.platform.npu import MC2_FROM_RANKS

_ROLLOUT = "actor_rollout_ref.rollout"
_KEYS = "recipe.rollout.ascend"


def checks(config: DictConfig, model: ModelShape) -> list[Check]:
    """The rules of this file; nothing where there is no NPU."""
    if not as_npu(config.recipe.platform):
        return []
    rules = _scheduler, _prefix_cache, _mixed_batches, _graphs, _graph_sizes, _groups
    return [check for rule in rules for check in rule(config, model)]


def _scheduler(config: DictConfig, model: ModelShape) -> Iterator[Check]:
    options, rollout = ascend_arguments(config), config.actor_rollout_ref.rollout
    scheduler = options.get("ascend_scheduler_config") or {}
    if not scheduler.get("enabled") or scheduler.get("enable_chunked_prefill"):
        return  # prompts are not taken whole
    longest = rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length
    budget = scheduler.get("max_num_batched_tokens") or rollout.max_num_batched_tokens
    held = f"max_num_batched_tokens {budget} holds prompt + response {longest}"
    fault = (
        f"{_ROLLOUT}.max_num_batched_tokens is {budget}, expected >= {longest} with {_KEYS}.scheduler=ascend"
        ": it takes a prompt whole, or a preempted response with its prompt, and drops what is longer without an "
        "answer, for which generate() waits without end (vllm_ascend/core/scheduler.py:156)"
    )
    yield either("Ascend scheduler", budget >= longest, held, fault)
    if options.get("chunked_prefill_for_mla") and config.recipe.rollout.ascend.prefix_caching:
        text = (
            f"{_KEYS}: scheduler=ascend, chunked_prefill_for_mla and prefix_caching, expected one of the three to be "
            "off: without chunked prefill a prompt's cached prefix is left out of its attention (mla_v1.py:428, "
            "vllm-ascend issue 1553)"
        )
        yield Check("Ascend scheduler", False, text)


def _prefix_cache(config: DictConfig, model: ModelShape) -> Iterator[Check]:
    row = "rollout.llm_arguments"
    if not config.recipe.rollout.ascend.prefix_caching and switched_off(config, row):
        text = (
            f"{_KEYS}.prefix_caching is false and row {row}, which takes it past verl's own keyword "
            "(vllm_rollout_spmd.py:162), is off; expected the row, or prefix_caching=true"
        )
        yield Check("prefix cache", False, text)


def _mixed_batches(config: DictConfig, model: ModelShape) -> Iterator[Check]:
    """With any scheduler: a prompt of which all but one token are in the prefix cache counts as a decode."""
    row = "rollout.ascend_decode_kv"
    if not graph_arguments(config):
        return
    fault = (
        f"row {row} is off and {_KEYS}.graphs is true: in a batch of decodes and prefills "
        "the KV of decode tokens would not be written (mla_v1.py:1188); expected recipe.patches without "
        f"-{row}, or no graphs"
    )
    off, held = switched_off(config, row), f"KV of all tokens in batches of decodes and prefills: row {row}"
    yield either("mixed batches", not off, held, fault)


def _graphs(config: DictConfig, model: ModelShape) -> Iterator[Check]:
    """Experts over 2 to 15 ranks are exchanged by all-to-all, whose lengths are values: no graph can hold it."""
    recipe, ranks = config.recipe, world_size(config)
    few = recipe.rollout.expert_parallel and 1 < ranks < MC2_FROM_RANKS
    if few and recipe.platform == "npu" and graph_arguments(config):
        text = (
            f"{_KEYS}.graphs with experts split over {ranks} ranks, expected at least "
            f"{MC2_FROM_RANKS}, recipe.rollout.expert_parallel=false, or no graphs: vllm-ascend exchanges tokens by "
            "all-to-all below (vllm_ascend/ascend_forward_context.py:22), which torchair cannot trace"
        )
        yield Check("graphs", False, text)


def _graph_sizes(config: DictConfig, model: ModelShape) -> Iterator[Check]:
    """The pin drops sizes above max_num_seqs without an error (model_runner_v1.py:2143)."""
    seats, sizes = vllm_arguments(config).get("max_num_seqs"), graph_arguments(config).get("graph_batch_sizes") or ()
    if seats and (above := [size for size in sizes if size > seats]):
        text = (
            f"{_KEYS}.graph_batch_sizes holds {', '.join(map(str, above))}, expected at most max_num_seqs {seats}: "
            "vllm-ascend drops larger ones (model_runner_v1.py:2143)"
        )
        yield Check("graph sizes", False, text)


def _groups(config: DictConfig, model: ModelShape) -> Iterator[Check]:
    row, groups = "rollout.ascend_expert_groups", hf_config_of(config).get("n_group")
    if model.n_routed_experts != 256 and groups not in (None, 1) and switched_off(config, row):
        text = (
            f"row {row} is off with {model.n_routed_experts} routed experts in {groups} groups; expected the row, 256 "
            "experts or 1 group: vllm-ascend ranks groups by their best expert, not by two (fused_moe.py:738)"
        )
        yield Check("expert groups", False, text)
