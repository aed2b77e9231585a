"""Check the rollout's layout, vLLM's arguments, and options that the pinned vllm-ascend cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from verl_patches.errors import Check, divides, either
from verl_patches.model.checks import experts_check
from verl_patches.platform.npu import MC2_MIN_RANKS
from verl_patches.spec import RunSpec

_ROLLOUT = "actor_rollout_ref.rollout"
_ASCEND = "recipe.rollout.ascend"
_DOCUMENTED_HEADS = (32, 64, 128)  # of a rank, for decode of MLA in graphs


def rollout_checks(run: RunSpec) -> Iterator[Check]:
    """Check that vLLM's instances can split experts and heads; runs that sample no response have no checks."""
    yield Check("rollout layout", True, str(run.rollout))
    if not run.samples:
        return
    rollout, engine, recipe = run.rollout, run.engine, run.recipe.rollout
    experts, heads = run.model.n_routed_experts, run.model.num_attention_heads
    if rollout.ep <= experts and experts % rollout.ep and not run.as_npu:  # vllm-ascend's exchanges need equal parts
        per_rank = experts // rollout.ep
        last = experts - (rollout.ep - 1) * per_rank
        yield Check("rollout experts", True, f"{per_rank} of {experts} experts a rank, {last} on the last")
    else:
        keys = "recipe.rollout.data_parallel_size or rollout.tensor_model_parallel_size"
        yield experts_check("rollout experts", rollout.ep, experts, keys)
    yield divides("rollout heads", heads, rollout.tp, f"{_ROLLOUT}.tensor_model_parallel_size", "heads a rank")
    wanted = {"enable_expert_parallel": recipe.enable_expert_parallel, "data_parallel_size": recipe.data_parallel_size}
    found = {key: engine.get(key) for key in wanted}
    unequal = [f"{key} is {found[key]}, expected {wanted[key]}" for key in wanted if found[key] != wanted[key]]
    fault = f"{'; '.join(unequal)}: change recipe.rollout instead, from which these arguments are derived"
    yield either("engine_kwargs.vllm", not unequal, "agrees with recipe.rollout", fault)
    if recipe.enable_expert_parallel and rollout.ep == 1:
        text = (
            "recipe.rollout.enable_expert_parallel needs rollout.tensor_model_parallel_size x "
            "recipe.rollout.data_parallel_size > 1; found 1 rank an instance, where vLLM ignores it"
        )
        yield Check("expert parallel", False, text)


def ascend_checks(run: RunSpec) -> Iterator[Check]:
    """Refuse options with which the pinned vllm-ascend would compute wrongly or wait forever, on NPUs."""
    if run.as_npu and run.samples:
        for rule in (_scheduler, _expert_streams, _decode_heads, _graphs, _graph_sizes):
            yield from rule(run)


def _scheduler(run: RunSpec) -> Iterator[Check]:
    options, recipe = run.ascend, run.recipe.rollout
    if not run.splits_prompts and options.get("chunked_prefill_for_mla") and recipe.ascend.prefix_caching:
        text = (
            f"{_ASCEND}: scheduler=ascend, chunked_prefill_for_mla and prefix_caching are all on; expected one of them "
            "off: without chunked prefill, attention ignores the cached prefix of a prompt "
            "(vllm_ascend.attention.mla_v1.AscendMLAMetadataBuilder.build, vllm-ascend issue 1553)"
        )
        yield Check("Ascend scheduler", False, text)


def _expert_streams(run: RunSpec) -> Iterator[Check]:
    """Refuse multistream_moe with experts cut over TP: parts of different tokens are added up, without an error.

    With multistream_moe each TP rank has its own tokens (vllm_ascend.models.deepseek_v2.CustomDeepseekV2DecoderLayer).
    """
    tp = run.rollout.tp
    if run.graphs.get("enable_multistream_moe") and tp > 1 and not run.recipe.rollout.enable_expert_parallel:
        text = (
            f"{_ASCEND}.multistream_moe is true with experts cut over {tp} TP ranks, expected false, or "
            "recipe.rollout.enable_expert_parallel=true: an all-reduce would add up outputs of different tokens "
            "(vllm_ascend.ops.fused_moe.AscendFusedMoE.forward)"
        )
        yield Check("expert streams", False, text)


def _decode_heads(run: RunSpec) -> Iterator[Check]:
    """Note a number of heads with which no document says that graphs can decode."""
    heads = run.model.num_attention_heads // run.rollout.tp
    if run.graphs and run.platform == "npu" and heads not in _DOCUMENTED_HEADS:
        text = (
            f"{heads} a rank, with graphs: npu_fused_infer_attention_score is documented for 32, 64 and 128 "
            "(op-plugin 7.1.0), vllm-ascend's PR 1404 says that newer CANN takes others; not tried. If a run ends with "
            f'"MLA only support {{32, 64, 128}}", set {_ASCEND}.graphs=false'
        )
        yield Check("decode heads", True, text, note=True)


def _graphs(run: RunSpec) -> Iterator[Check]:
    """Refuse graphs with experts over 2 to 15 ranks: their all-to-all has lengths that graphs cannot capture."""
    recipe, ranks = run.recipe, run.world_size
    few = recipe.rollout.enable_expert_parallel and 1 < ranks < MC2_MIN_RANKS
    if few and recipe.platform == "npu" and run.graphs:
        text = (
            f"{_ASCEND}.graphs is true with experts split over {ranks} ranks, expected at least "
            f"{MC2_MIN_RANKS}, recipe.rollout.enable_expert_parallel=false, or graphs=false: with fewer ranks "
            "vllm-ascend uses an all-to-all (vllm_ascend.ascend_forward_context.get_fused_moe_state), which torchair "
            "cannot trace"
        )
        yield Check("graphs", False, text)


def _graph_sizes(run: RunSpec) -> Iterator[Check]:
    """Refuse graph sizes above max_num_seqs, which the pinned vllm-ascend drops without an error."""
    limit, sizes = run.engine.get("max_num_seqs"), run.graph_sizes
    if limit and (above := [size for size in sizes if size > limit]):
        text = (
            f"{_ASCEND}.graph_batch_sizes holds {', '.join(map(str, above))}, expected at most max_num_seqs {limit}: "
            "vllm-ascend drops larger ones "
            "(vllm_ascend.worker.model_runner_v1.NPUModelRunner.check_torchair_graph_batch_sizes)"
        )
        yield Check("graph sizes", False, text)
