"""Compare level reference and the step model with the public recipe, and model what level tuned gains over reference.

readme_tables.py writes the tables into docs/levels.md, which names the commit of the public recipe and its files, and
into docs/plan.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from verl_patches.catalog import platform_rows
from verl_patches.plan.calibration import calibration_errors, likely_range
from verl_patches.plan.memory_plan import run_memory, with_planned_keys
from verl_patches.plan.step_plan import Workload, step_sections
from verl_patches.run import hccl
from verl_patches.run.compose import compose
from verl_patches.run.engine_options import OPTIONS_KEY
from verl_patches.run.environment import environment_variables
from verl_patches.run.resolve import changed_run
from verl_patches.spec import RunSpec

RANDOM, TRUE_WEIGHT = RUNS = ("deepseekv3_256die_random_init", "deepseekv3_256die_true_weight")
_ACTOR, _ROLLOUT, _ASCEND = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "recipe.rollout.ascend"
_MEGATRON, _REF, _TRAIN = f"{_ACTOR}.megatron", "actor_rollout_ref.ref", "recipe.train"
_CHECKPOINT = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint"
_GRAPHS = f"{OPTIONS_KEY}.torchair_graph_config"
_SPMD, _YAML = "vllm_rollout_spmd.py", "ppo_mindspeed_trainer.yaml"
_LONGER = Workload(response_tokens=1650.0)
_ENGINE, _WORKERS = "initialize_training.py", "megatron_workers.py"


@dataclass(frozen=True)
class Setting:
    """Describe a setting of the public recipe: its name there, its value there in our units, its source, and our key.

    value: of both runs, or a pair (random weights, true weights). key: dotted, or the name of an environment variable;
    empty where we have none. note: why ours differs, or what else a reader must know.
    """

    name: str
    value: Any
    source: str
    key: str = ""
    note: str = ""

    @property
    def values(self) -> tuple[Any, Any]:
        """Return the value there of the run with random weights, and of the one with true weights."""
        return self.value if isinstance(self.value, tuple) else (self.value, self.value)


SETTINGS = (
    # layout
    Setting("NNODES", 16, "script", "trainer.nnodes"),
    Setting("NPUS_PER_NODE", 16, "script", "trainer.n_gpus_per_node"),
    Setting("VLLM_DP_SIZE", (128, 64), "script", "recipe.rollout.data_parallel_size"),
    Setting("rollout.tensor_model_parallel_size", 2, "start", f"{_ROLLOUT}.tensor_model_parallel_size"),
    Setting("enable_expert_parallel", True, _SPMD, "recipe.rollout.enable_expert_parallel"),
    Setting("actor.megatron.tensor_model_parallel_size", 4, "start", f"{_MEGATRON}.tensor_model_parallel_size"),
    Setting("actor.megatron.pipeline_model_parallel_size", 8, "start", f"{_MEGATRON}.pipeline_model_parallel_size"),
    Setting(
        "actor.megatron.expert_model_parallel_size",
        32,
        f"start, {_ENGINE}",
        f"{_MEGATRON}.expert_model_parallel_size",
        "there it is 8, which moe_tp_extend_ep multiplies by TP4",
    ),
    Setting("pipeline_parallel_num_layer_list", [7, 7, 8, 8, 8, 8, 8, 7], "start", f"{_TRAIN}.layers_per_stage"),
    Setting("actor.megatron.sequence_parallel", True, "start", f"{_MEGATRON}.sequence_parallel"),
    # data, loss, sampling
    Setting("data.train_batch_size", 512, "start", "data.train_batch_size"),
    Setting("data.max_prompt_length", 1024, "start", "data.max_prompt_length"),
    Setting("data.max_response_length", 3072, "start", "data.max_response_length"),
    Setting("rollout.n", 16, "start", f"{_ROLLOUT}.n"),
    Setting("rollout.temperature", 0.9, "start", f"{_ROLLOUT}.temperature"),
    Setting("rollout.top_k", 50, "start", f"{_ROLLOUT}.top_k"),
    Setting(
        "rollout.top_p",
        0.9,
        "start",
        f"{_ROLLOUT}.top_p",
        "row rollout.ascend_top_k_top_p: the pin swaps k and p under VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE=1, so the "
        "published runs sampled otherwise",
    ),
    Setting("rollout.ignore_eos", (True, False), "start", f"{_ROLLOUT}.ignore_eos"),
    Setting("actor.optim.lr", 1e-6, "start", f"{_ACTOR}.optim.lr"),
    Setting("adam_beta2", 0.95, _ENGINE, f"{_TRAIN}.adam_beta2"),
    Setting("actor.ppo_mini_batch_size", 512, "start", f"{_ACTOR}.ppo_mini_batch_size"),
    Setting("actor.ppo_micro_batch_size_per_gpu", 1, "start", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    Setting("actor.kl_loss_coef", 0.001, "start", f"{_ACTOR}.kl_loss_coef"),
    Setting("actor.kl_loss_type", "low_var_kl", "start", f"{_ACTOR}.kl_loss_type"),
    Setting("ref.log_prob_micro_batch_size_per_gpu", 8, "start", f"{_REF}.log_prob_micro_batch_size_per_gpu"),
    Setting(
        "rollout.log_prob_micro_batch_size_per_gpu",
        4,
        "start",
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        "no run has a pass for old log-probs",
    ),
    Setting("actor.recompute_old_log_prob=False", True, _YAML, f"{_TRAIN}.skip_old_log_prob"),
    Setting("actor.load_weight", (False, True), "start", f"{_ACTOR}.load_weight"),
    Setting("ref.load_weight", (False, True), "start", f"{_REF}.load_weight"),
    Setting("VLLM_ENABLE_FIX_ROUTE", (True, False), "script", "recipe.rollout.balanced_routing"),
    Setting("actor.megatron.fix_router", (True, False), "start", f"{_TRAIN}.balanced_routing"),
    Setting(
        "moe_router_bias_update_rate",
        0.001,
        _ENGINE,
        f"{_TRAIN}.moe_router_bias_update_rate",
        "DeepSeek-V3's biases are trained; a run that should move them sets the key",
    ),
    # training engine
    Setting("actor.megatron.swap_optimizer", True, "start", f"{_TRAIN}.swap_optimizer"),
    Setting("actor.megatron.optimizer_offload", False, "start", f"{_MEGATRON}.optimizer_offload"),
    Setting(
        "activations_checkpoint_num_layers",
        (None, 8),
        "start; the page's first figures: 4",
        f"{_CHECKPOINT}_num_layers",
        "which means all layers of each stage, as 8 does there",
    ),
    Setting("moe_alltoall_overlap_comm", True, _ENGINE, f"{_TRAIN}.moe_alltoall_overlap_comm"),
    Setting("gemm_gradient_accumulation_fusion", True, _ENGINE, f"{_TRAIN}.gemm_gradient_accumulation_fusion"),
    Setting(
        "overlap_grad_reduce",
        True,
        _ENGINE,
        "",
        "without effect there: verl.utils.megatron_utils.get_model at the pin builds DDP without it",
    ),
    Setting("no_gradient_accumulation_fusion=True", False, _ENGINE, f"{_TRAIN}.gradient_accumulation_fusion"),
    Setting("use_fused_rmsnorm", True, _ENGINE, f"{_TRAIN}.use_fused_rmsnorm"),
    Setting("use_fused_swiglu", True, _ENGINE, f"{_TRAIN}.use_fused_swiglu"),
    Setting("use_fused_rotary_pos_emb", True, _ENGINE, f"{_TRAIN}.use_fused_rotary_pos_emb"),
    Setting(
        "use_fused_moe_token_permute_and_unpermute",
        True,
        _ENGINE,
        f"{_TRAIN}.use_fused_moe_token_permute_and_unpermute",
    ),
    Setting("trainer.balance_batch", False, "start", "trainer.balance_batch"),
    Setting("D2D_DATA_TRANSFER", True, "script", "recipe.tensor_cache.enabled"),
    # rollout engine
    Setting("VLLM_USE_V1", "1", "script", "VLLM_USE_V1"),
    Setting("VLLM_ENABLE_GRAPH_MODE", True, "script", f"{_ASCEND}.graphs"),
    Setting(
        "graph_batch_sizes", [64], f"{_SPMD}, {_WORKERS}", f"{_GRAPHS}.graph_batch_sizes", "one graph: max_num_seqs"
    ),
    Setting(
        "max_num_seqs", 64, _WORKERS, f"{_ROLLOUT}.engine_kwargs.vllm.max_num_seqs", "as many as are never preempted"
    ),
    Setting("enable_multistream_mla", True, _SPMD, f"{_ASCEND}.multistream_mla"),
    Setting("enable_multistream_moe", True, _SPMD, f"{_ASCEND}.multistream_moe"),
    Setting("enable_view_optimize", False, _SPMD, f"{_ASCEND}.view_optimize"),
    Setting(
        "enable_kv_nz",
        False,
        f"{_SPMD}; the page says True",
        f"{_ASCEND}.kv_nz",
        "true is refused: the pin writes prompts a second time in the other format, which the recipe's patch "
        "0001-FIX-KVcache-NZ removes",
    ),
    Setting("ascend_scheduler_config.enabled", "ascend", _SPMD, f"{_ASCEND}.scheduler"),
    Setting(
        "rollout.enable_chunked_prefill",
        True,
        "start",
        f"{_ROLLOUT}.enable_chunked_prefill",
        "without effect there: ascend_scheduler_config.enable_chunked_prefill=False wins; verl at the pin refuses true "
        "while max_num_batched_tokens is below prompt + response",
    ),
    Setting("rollout.max_num_batched_tokens", 1024, "start", f"{_ROLLOUT}.max_num_batched_tokens"),
    Setting("enable_prefix_caching", False, _SPMD, f"{_ASCEND}.prefix_caching"),
    Setting("chunked_prefill_for_mla", False, "unset", f"{_ASCEND}.chunked_prefill_for_mla"),
    Setting("rollout.gpu_memory_utilization", 0.8, "start", f"{_ROLLOUT}.gpu_memory_utilization"),
    Setting("enable_sleep_mode", False, _SPMD, note="false here too (row memory.sleep_mode)"),
    Setting(
        "frozen_parameter",
        "as the pin, True",
        "unset",
        note="False here (row memory.graph_addresses): weights have other addresses after each sleep, and graphs must "
        "read them; what this costs a decode step is not modelled",
    ),
    Setting("VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE", True, "script", f"{_ASCEND}.top_k_optimize"),
    Setting(
        "VLLM_ASCEND_MLA_PA",
        "0",
        "unset",
        "VLLM_ASCEND_MLA_PA",
        "matters only outside of decode graphs: while another rank of the instance has prompts, and at level safe",
    ),
    # environment
    Setting("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "script", "PYTORCH_NPU_ALLOC_CONF"),
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", "script", "CUDA_DEVICE_MAX_CONNECTIONS"),
    Setting("TASK_QUEUE_ENABLE", "2", "script", "TASK_QUEUE_ENABLE"),
    Setting("HCCL_OP_EXPANSION_MODE", "AIV", "script", "recipe.hccl.expansion_mode"),
    Setting("HCCL_BUFFSIZE", "300", "script", "HCCL_BUFFSIZE", "recipe.hccl.buffer_mib is null: what the layout needs"),
    Setting("buffers of small groups", None, "unset: HCCL_BUFFSIZE", "recipe.hccl.small_groups_mib"),
    Setting(
        "HCCL_CONNECT_TIMEOUT", "600", "script", "HCCL_CONNECT_TIMEOUT", "ranks of 16 nodes may start minutes apart"
    ),
    Setting(
        "HCCL_EXEC_TIMEOUT",
        "600",
        "script",
        "HCCL_EXEC_TIMEOUT",
        "a minute less than recipe.train.distributed_timeout_minutes, so that HCCL reports before the watchdog",
    ),
    Setting(
        "HCCL_IF_BASE_PORT", 64247, "script", "recipe.hccl.base_port", "144 ports outside the range of ephemeral ports"
    ),
    Setting("SOCKET_IFNAME", "given", "script", note="recipe.hccl.interface; null finds the one towards Ray's head"),
    Setting("MASTER_ADDR", "given", "script", note="the first of `hosts` in configs/cluster_256die.yaml"),
    Setting("DIST_CKPT_PATH", "shards", "script", note="not used: every rank reads actor_rollout_ref.model.path"),
    Setting("PROFILE_UPDATE", "0", "script", note="recipe.profile.steps=[N]"),
    Setting("PRINT_MEMORY", "1", "script", note="recipe.memory.ledger, on"),
    Setting("ROLLOUT_REBALANCE_ENABLE", "unset", _WORKERS, note="no counterpart here"),
    Setting(
        "VLLM_ENABLE_MC2, VLLM_ASCEND_ACL_OP_INIT_MODE",
        "1, 0",
        "script",
        note="nothing reads them at the pin; MC2 is used wherever experts are split over 16 ranks or more",
    ),
)


def reference_values(run: RunSpec) -> dict[str, Any]:
    """Return {key of SETTINGS: its value in a run}."""
    variables = {variable.name: variable.value for variable in environment_variables(run)}
    keys = [setting.key for setting in SETTINGS if setting.key]
    found = {key: variables[key] if key in variables else OmegaConf.select(run.verl, key) for key in keys}
    return {key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for key, value in found.items()}


def comparison() -> Iterator[tuple[Setting, tuple[Any, Any] | None]]:
    """Yield each setting with the values of our two 256-die runs at level reference; None without a key of ours."""
    first, second = (reference_values(_run(name, "reference")) for name in RUNS)
    for setting in SETTINGS:
        yield setting, (first[setting.key], second[setting.key]) if setting.key else None


def _run(name: str, level: str) -> RunSpec:
    return with_planned_keys(compose(name, [f"level={level}"], platform_rows))


@functools.cache
def reference_list() -> str:
    """Return the settings that are equal here and there, with their values, and a list of the others with notes."""
    equal, others = [], []
    for setting, ours in comparison():
        there = f"`{setting.name}` {_both(setting.values)}"
        if ours == setting.values and not setting.note:
            equal.append(there)
            continue
        here = "; equal here" if ours == setting.values else f"; here `{setting.key}` {_both(ours)}" if ours else ""
        others.append(f"- {there} ({setting.source}){here}: {setting.note}.".replace("actor_rollout_ref.", ""))
    return f"Equal: {', '.join(equal)}.\n\nDifferent, or with a note:\n\n" + "\n".join(others) + "\n"


def _both(values: tuple[Any, Any]) -> str:
    first, second = (_shown(value) for value in values)
    return first if first == second else f"{first} / {second}"


def _shown(value: Any) -> str:
    return {None: "-", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Gain:
    """Describe what level tuned has beyond reference: the keys, or rows, that switch it off again.

    basis: where the seconds come from; without `modelled` it says what is known instead.
    """

    what: str
    keys: dict[str, Any]
    rows: frozenset[str]
    basis: str
    modelled: bool = True


def _keys(what: str, basis: str, **keys: Any) -> Gain:
    return Gain(what, {f"{_ASCEND}.{key}": value for key, value in keys.items()}, frozenset(), basis)


def _rows(what: str, rows: str, basis: str, modelled: bool = True) -> Gain:
    return Gain(what, {}, frozenset(rows.split()), basis, modelled)


GAINS = (
    Gain(
        "fewer recomputed layers",
        {f"{_CHECKPOINT}_num_layers": 61},
        frozenset(),
        "operations, from the memory plan's layers",
    ),
    Gain("micro batches of equal lengths", {"trainer.balance_batch": False}, frozenset(), "lognormal lengths, cv 0.55"),
    _keys("decode graphs of 8, 16, 32, ...", "published seconds of batches 1 to 64", graph_batch_sizes=[64]),
    _keys(
        "decodes and pieces of prompts in one step, shared prefixes",
        "without it a step of prompts stops decodes",
        scheduler="ascend",
        prefix_caching=False,
        chunked_prefill_for_mla=False,
    ),
    _rows(
        "one all-reduce less in a decode step",
        "rollout.ascend_dp_sync rollout.ascend_dp_metadata",
        "3 ms each, published",
    ),
    _rows("one copy of a call's arguments", "dispatch.put_once", "bytes through Ray; the tensor cache leaves few"),
    _rows("no garbage collector in a rollout", "rollout.no_collector", "not modelled", modelled=False),
)


def seconds(run: RunSpec) -> float:
    """Return the modelled seconds of a step, as its plan has them."""
    return step_sections(run, run_memory(run), Workload())["step"]["total_s"]


def gains() -> Iterator[tuple[Gain, float | None]]:
    """Yield each part of level tuned with the modelled seconds of a step that it saves, alone, with true weights."""
    tuned = _run(TRUE_WEIGHT, "tuned")
    for gain in GAINS:
        without = changed_run(tuned, gain.keys) if gain.keys else tuned
        without = replace(without, rows=tuned.rows - gain.rows)
        yield gain, seconds(without) - seconds(tuned) if gain.modelled else None


@functools.cache
def gains_table() -> str:
    """Return the table of what level tuned adds, with modelled gains."""
    reference, tuned = (_run(TRUE_WEIGHT, level) for level in ("reference", "tuned"))
    text = ["| what | off by | seconds of a step saved (modelled, range) | basis |", "|---" * 4 + "|"]
    for gain, saved in gains():
        off = [f"`{key.removeprefix('actor_rollout_ref.')}={_shown(value)}`" for key, value in gain.keys.items()]
        off += [f"`-{row}`" for row in sorted(gain.rows)]
        text.append(f"| {gain.what} | {', '.join(off)} | {'-' if saved is None else _range(saved, 1)} | {gain.basis} |")
    total = f"{_range(seconds(reference))} -> {_range(seconds(tuned))}"
    text.append(f"| all of it, level reference -> tuned | `level=reference` | {total} | |")
    small = [sum(hccl.buffer_bytes(run).values()) / 1e9 for run in (reference, tuned)]
    text.append(
        "| buffers of small groups | `recipe.hccl.small_groups_mib=null` | "
        f"{small[0]:.1f} -> {small[1]:.1f} GB of a die | sizes of groups |"
    )
    return "\n".join(text) + "\n"


def _range(modelled: float, digits: int = 0) -> str:
    return " to ".join(f"{bound:.{digits}f}" for bound in likely_range("total", modelled))


@functools.cache
def errors_list() -> str:
    """Return the totals of the published runs, quoted, modelled and their errors, and the largest errors of phases."""
    rows = [row for row in calibration_errors() if not row["fixes"]]
    text = []
    for row in rows:
        run, _, name = row["row"].rpartition(": ")
        if name == "total":
            figures = f"{row['quoted_s']:g} / {row['modelled_s']:.4g} ({row['error']:+.1%})"
            text.append(f"- {run or 'random weights'}: {figures}")
    lowest, highest = (end(rows, key=lambda row: row["error"]) for end in (min, max))
    ends = [f"{row['error']:+.1%} ({row['row']})" for row in (lowest, highest)]
    return "\n".join([*text, f"- phases: {' to '.join(ends)}"]) + "\n"


@functools.cache
def totals_table() -> str:
    """Return the table of a step's seconds in both 256-die runs at two levels."""
    text = ["| config | level | step s | modelled |", "|---" * 4 + "|"]
    for name, option, workload in ((RANDOM, "", Workload()), (TRUE_WEIGHT, " --response-tokens 1650", _LONGER)):
        for level in ("reference", "tuned"):
            run = _run(name, level)
            step = step_sections(run, run_memory(run), workload)["step"]
            low, high = step["total_range_s"]
            cells = f"`{name}{option}`", level, f"{low:.0f} to {high:.0f}", f"{step['total_s']:.0f}"
            text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text) + "\n"
