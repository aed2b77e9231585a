"""Test that each rule of verl_patches/rules.py refuses only runs that would fail or compute wrongly."""

import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from tests.runs import composed
from tests.weights.cases import make_fp8_folder, make_start
from verl_patches import rules
from verl_patches.errors import require_checks
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.tiny import tiny_config
from verl_patches.rules import RULES, SIZE_RULES
from verl_patches.run.files import folder_checks, with_required_files
from verl_patches.run.resolve import CONFIGS_DIR, ROLLOUT_LAYOUT, TRAIN_LAYOUT, LayoutError
from verl_patches.weights.convert import convert
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.source import open_source

PUBLIC = Path(__file__).parents[1] / "layout" / "deepseek_v3_public_config.json"
TINY, LARGE, RANDOM = ("deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight", "deepseekv3_256die_random_init")
ACTOR, SAMPLING = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
MODEL_CONFIG = "actor_rollout_ref.model.override_config.model_config"
PPO, VLLM = "actor_rollout_ref.actor.ppo", f"{SAMPLING}.engine_kwargs.vllm"
ASCEND = "recipe.rollout.ascend"
GRAPHS = f"{ASCEND}.graph_batch_sizes"
WHOLE_PROMPTS, NO_CHUNKS = f"{ASCEND}.scheduler=ascend", f"{ASCEND}.chunked_prefill_for_mla=false"
IN_CHUNKS = f"+{VLLM}.additional_config.ascend_scheduler_config.enable_chunked_prefill=true"
DP = "recipe.rollout.data_parallel_size"
CACHED_GRAPH = f"+{VLLM}.additional_config.torchair_graph_config.use_cached_graph=true"
BUDGET = f"{SAMPLING}.max_num_batched_tokens"
ALONE, TP2 = f"{ACTOR}.expert_model_parallel_size=1", f"{ACTOR}.tensor_model_parallel_size=2"
EIGHT_RANKS = ["trainer.nnodes=1", "trainer.n_gpus_per_node=8", "recipe.train.layers_per_stage=null"]
EIGHT_RANKS += ["recipe.rollout.instances=1", "recipe.rollout.data_parallel_size=4"]
EIGHT_RANKS += [f"{ACTOR}.pipeline_model_parallel_size=1", f"{ACTOR}.expert_model_parallel_size=8"]
CUT_EXPERTS = "recipe.rollout.enable_expert_parallel=false", "recipe.rollout.data_parallel_size=1"
EMULATED = "recipe.line=a3", "recipe.platform=npu_emulated"
STAGES = "recipe.train.layers_per_stage=[{},8,8,8,8,8,7]".format
TINY_STAGES = f"{ACTOR}.pipeline_model_parallel_size=2", "recipe.train.layers_per_stage=[1,3]", "recipe.line=a3"
REPLAY, SKIP = "recipe.train.routing_replay=R2", "recipe.train.skip_old_log_prob"
PROFILE, SAVE, OFF = "recipe.profile.{}".format, "trainer.save_freq=1", "recipe.patches=[-{}]".format
LOG_PROB = f"{SAMPLING}.log_prob_micro_batch_size"
SMALL_BUCKETS = "recipe.reshard.bucket_bytes=1000"


def recomputed(method, layers=0, model="actor_rollout_ref"):
    settings = {"granularity": "full", "method": method, "num_layers": layers}
    key = f"++{model}.model.gradient_checkpointing_kwargs.activations_checkpoint"
    on = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    return [on, *(f"{key}_{name}={value}" for name, value in settings.items())]


# (rule, config, overrides whose faults do not hide each other, words of each refusal)
REFUSED = [
    (rules.model_checks, LARGE, [f"+{MODEL_CONFIG}.{given}" for given in (
        "num_nextn_predict_layers=1", "topk_method=greedy")],
     ["predict_layers is 1, expected 0", "'greedy', expected 'noaux_tc'"]),
    (rules.model_checks, TINY, [f"+{MODEL_CONFIG}.hidden_size=x"], ["hidden_size is 'x'; expected a whole number"]),
    (rules.train_checks, LARGE, [
        "recipe.train.layers_per_stage=[8,8,8,8,8,8,8,7]", f"{ACTOR}.expert_model_parallel_size=2",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4"],
     ["layers: .*63.*61", "multiple of tp 4; found 1 and 2", "actor = ref: .*8 != 4"]),
    (rules.train_checks, TINY, ["algo=ppo", "critic.megatron.expert_model_parallel_size=1"],
     ["actor = critic: .*2 != 1"]),
    (rules.train_checks, LARGE, [STAGES("3,11")], ["stage 0 has no layer with experts"]),  # it would hang
    (rules.expert_checks, TINY, [TP2, ALONE], ["expected ep > 1 or etp = tp at tp 2"]),
    (rules.recomputation_checks, TINY, recomputed("uniform"), ["_ref.model: .*num_layers=0 needs .*method=block"]),
    (rules.engine_checks, LARGE, ["actor_rollout_ref.actor.megatron.use_dist_checkpointing=true"], ["stacked experts"]),
    (rules.rollout_checks, LARGE, [f"{VLLM}.enable_expert_parallel=false"], ["is False, expected True"]),
    (rules.rollout_checks, RANDOM, ["trainer.nnodes=32", "recipe.rollout.data_parallel_size=256"],
     ["256 routed experts over 512 ranks"]),
    (rules.rollout_checks, LARGE, ["trainer.nnodes=18", f"{ACTOR}.expert_model_parallel_size=4",
                                   "recipe.rollout={instances: 2, data_parallel_size: 72}"],
     ["256 routed experts over 144 ranks"]),  # MC2 takes 144 ranks
    (rules.rollout_checks, TINY, ["recipe.rollout.enable_expert_parallel=true"], ["found 1 rank an instance"]),
    (rules.whole_prompt_checks, LARGE, ["data.max_prompt_length=2048"],
     ["1024, expected >= 5120 .* a prompt alone has up to 2048"]),
    (rules.whole_prompt_checks, LARGE, [f"{SAMPLING}.gpu_memory_utilization=0.6"],
     ["may be preempted, as 64 of 4096 tokens need 262144 tokens of KV cache, and a die holds 0"]),
    (rules.whole_prompt_checks, TINY, [*EMULATED, WHOLE_PROMPTS, f"{BUDGET}=128"],  # its KV cache is not modelled
     ["128, expected >= 272"]),
    (rules.ascend_checks, LARGE, ["level=tuned", WHOLE_PROMPTS], ["chunked_prefill_for_mla .* expected one"]),
    (rules.ascend_checks, LARGE, ["level=tuned", f"{GRAPHS}=[64,128]"],
     ["holds 128, expected at most max_num_seqs 64"]),
    (rules.ascend_checks, LARGE, [*CUT_EXPERTS, "recipe.rollout.instances=128"],
     ["multistream_moe is true with experts cut over 2 TP ranks"]),
    (rules.ascend_checks, LARGE, EIGHT_RANKS, [r"split over 8 ranks, expected at least 16.* all-to-all"]),
    (rules.sleep_checks, TINY, [f"{SAMPLING}.enforce_eager=false", OFF("memory.*")],
     ["platform is cpu, .*; expected recipe.patches without -memory.sleep_mode and .*enforce_eager=true"]),
    (rules.sleep_checks, LARGE, [OFF("memory.graph_addresses")], ["memory.graph_addresses is off: captured graphs"]),
    (rules.sleep_checks, LARGE, [CACHED_GRAPH], ["use_cached_graph is set, whose graphs no patch changes"]),
    (rules.length_checks, LARGE, [f"{SAMPLING}.enable_chunked_prefill=true", "data.max_prompt_length=200000"],
     ["1024; expected .* 203072", "model's 163840 positions"]),
    (rules.length_checks, TINY, [f"{BUDGET}=128"], ["prefill: .*128; expected .* 272"]),
    (rules.max_num_seqs_checks, LARGE, ["level=tuned", f"{GRAPHS}=[1,32]"], ["size is 32; expected at least the"]),
    (rules.filter_groups_checks, TINY, ["recipe.filter_groups.metric=score", f"{SAMPLING}.n=1"], ["must differ"]),
    (rules.reward_checks, TINY, ["recipe.rewards=[]"], ["every reward would be 0"]),
    (rules.reward_model_checks, TINY,
     ["recipe.rewards=[{name: reward_model, path: a}]", "reward_model.micro_batch_size_per_gpu=null"],
     ["micro_batch_size_per_gpu is null"]),
    (rules.ratio_checks, TINY, [f"{SKIP}=true", f"{PPO}_epochs=2"], ["ppo_epochs is 2: .* set 1"]),
    (rules.logprob_checks, RANDOM, ["recipe.logprob_check={action: stop, every: 10}"], ["balanced routing"]),
    (rules.estimator_checks, TINY, [f"{SAMPLING}.n=1"], ["rollout.n is 1; expected 2 or more"]),
    (rules.objective_checks, TINY, ["algo=sft", OFF("update.on_policy")], ["row update.on_policy is off"]),
    (rules.batch_checks, LARGE, [
        "data.train_batch_size=500", f"{PPO}_mini_batch_size=300", f"{PPO}_micro_batch_size_per_gpu=7",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7"],
     ["prompts: 500 is not a multiple of 256", "actor mini batch: 500 is not a multiple of 300",
      f"actor micro batch: 600 is not a multiple of 7; change {PPO}_micro_batch_size_per_gpu, which is 7: each rank",
      "ref micro batch: 1000 is not a multiple of 7"]),
    (rules.batch_checks, TINY, ["algo=ppo", "critic.ppo_micro_batch_size_per_gpu=null", "critic.ppo_mini_batch_size=3"],
     ["critic micro batch: .*is null; verl needs it", "critic mini batch: .*not a multiple of 3"]),
    (rules.batch_checks, TINY, [f"{LOG_PROB}_per_gpu=null"], ["plans read it"]),
    (rules.critic_checks, TINY, ["algo=ppo", "critic.use_dynamic_bsz=true", "critic.rollout_n=3",
                                 "critic.load_weight=false", OFF("update.recipe_critic")],
     ["no critic here supports it", "expected .*rollout.n, 2", "load_weight must be true", "verl's own critic"]),
    (rules.micro_batch_checks, TINY, [
        "recipe.tensor_cache.enabled=true", "data.return_raw_chat=true", "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"{PPO}_max_token_len_per_gpu=8"],
     ["tensor cache: .*return_raw_chat is true", "micro batch: .*ppo_max_token_len_per_gpu 8"]),
    (rules.routing_replay_checks, LARGE, [REPLAY, f"{SKIP}=true"], ["skip_old_log_prob leaves out the pass"]),
    (rules.routing_replay_checks, RANDOM, [REPLAY, f"{SKIP}=false", OFF("update.routing_samples")],
     ["balanced_routing ignores the router", "row update.routing_samples is off"]),
    (rules.sync_checks, LARGE, [SMALL_BUCKETS], ["at least 14336, the bytes of one row of model.*; found 1000"]),
    (rules.checkpoint_checks, TINY, [SAVE, "trainer.default_hdfs_dir=hdfs://x", OFF("checkpoint.*"),
                                     f"{ACTOR}.use_distributed_optimizer=false"],
     ["files go to trainer.default_local_dir", "checkpoint.parts, checkpoint.save, checkpoint.load",
      "optimizer: .*expected true: each rank"]),
    (rules.restart_checks, TINY, ["recipe.restart.max_restarts=1", "recipe.restart.exclude_nodes=[a]"],
     ["save_freq is -1", "exclude_nodes needs recipe.ray_address"]),
    (rules.profile_checks, TINY, [PROFILE("steps=[1]"), PROFILE("ranks=[2]"), PROFILE("phases=[values,old_log_prob]"),
                                  f"{SKIP}=true"],
     ["2 is not a rank .* expected 0 to 1", "has no values", "has no old_log_prob"]),
    (rules.support_checks, TINY, ["critic.optim.warmup_style=cosine"],
     ["line pypi: .*Instead: a constant critic.optim.lr"]),
    (rules.hccl_checks, LARGE, ["level=tuned", "recipe.hccl.buffer_mib=200", "recipe.hccl.base_port=6300"],
     ["HCCL buffer: ", "HCCL ports: "]),
]  # fmt: skip
# cases close to a refusal that pass; the configs of this repository pass all rules
ACCEPTED = [
    (rules.train_checks, LARGE, [STAGES("4,10")]),
    (rules.train_checks, TINY, [*TINY_STAGES, ALONE]),  # one optimizer makes one reduction
    (rules.recomputation_checks, TINY, recomputed("block")),
    (rules.recomputation_checks, TINY, recomputed("uniform")[1:]),  # recomputation is off
    (rules.whole_prompt_checks, LARGE, []),
    (rules.whole_prompt_checks, TINY, [*EMULATED, WHOLE_PROMPTS]),
    (rules.ascend_checks, LARGE, ["level=tuned", WHOLE_PROMPTS, NO_CHUNKS]),
    (rules.ascend_checks, LARGE, ["level=tuned", WHOLE_PROMPTS, IN_CHUNKS]),
    (rules.ascend_checks, LARGE, ["level=tuned", f"{GRAPHS}=[8,64]"]),
    (rules.ascend_checks, LARGE, [*EIGHT_RANKS, "recipe.platform=npu_emulated"]),
    (rules.ascend_checks, LARGE, [*EIGHT_RANKS, "recipe.rollout.data_parallel_size=1", "recipe.rollout.instances=4",
                                  "recipe.rollout.enable_expert_parallel=false", f"{ASCEND}.multistream_moe=false"]),
    (rules.ascend_checks, LARGE, [*CUT_EXPERTS, "recipe.rollout.instances=256",
                                  f"{SAMPLING}.tensor_model_parallel_size=1"]),
    (rules.batch_checks, TINY, ["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null",
                                "actor_rollout_ref.actor.use_kl_loss=false"]),  # the run has no reference model
    (rules.critic_checks, TINY, ["critic.use_dynamic_bsz=true", "critic.load_weight=false"]),  # the run has no critic
    (rules.routing_replay_checks, TINY, [REPLAY]),
    (rules.sync_checks, LARGE, [SMALL_BUCKETS, OFF("reshard.*")]),  # the feature is off
    (rules.checkpoint_checks, TINY, [SAVE]),
    (rules.profile_checks, TINY, [PROFILE("steps=[1,3]"), PROFILE("ranks=[0,1]"), PROFILE("phases=[values]"),
                                 "algo=ppo"]),
]  # fmt: skip


def failed_checks(rule, run):
    return [f"{check.name}: {check.detail}" for check in rule(run) if not check.ok]


@pytest.mark.parametrize(("rule", "name", "overrides", "words"), REFUSED)
def test_a_run_that_would_fail_or_compute_wrongly_is_refused(rule, name, overrides, words):
    found = failed_checks(rule, composed(name, overrides))
    assert [each for each in words if not any(re.search(each, text) for text in found)] == [], found


@pytest.mark.parametrize(("rule", "name", "overrides"), ACCEPTED)
def test_what_is_close_to_a_refusal_passes(rule, name, overrides):
    assert failed_checks(rule, composed(name, overrides)) == []


def test_graphs_with_numbers_of_heads_that_no_document_names_are_noted():
    def notes(tp):
        run = composed(LARGE, [f"{SAMPLING}.tensor_model_parallel_size={tp}", f"{DP}={128 // tp}"])
        return [check.detail for check in rules.ascend_checks(run) if check.note]

    assert notes(4) == [] and "16 a rank, with graphs: " in notes(8)[0]


@pytest.mark.parametrize(
    ("name", "share", "lowered"),
    [("deepseekv3_64die", "0.8", None), (LARGE, "0.8", (64, 48)), ("deepseekv3_256die_16k", "0.8", (32, 8))],
)
def test_max_num_seqs_is_lowered_until_no_request_is_preempted(name, share, lowered):
    run = composed(name, [f"{SAMPLING}.gpu_memory_utilization={share}"])
    (check,) = rules.whole_prompt_checks(run)
    before, after = lowered or (None, 64)
    assert check.ok and check.note is bool(lowered) and ("lowered from" in check.detail) is bool(lowered)
    assert (run.lowered_from, run.max_num_seqs, run.graph_sizes) == (before, after, (after,))
    whole = composed(name, [f"{SAMPLING}.gpu_memory_utilization={share}", "level=tuned"])
    assert whole.lowered_from is None and list(rules.whole_prompt_checks(whole)) == []


def test_every_rule_of_sizes_has_a_run_that_it_refuses():
    assert {rule for rule, *_ in REFUSED} == set(SIZE_RULES)


@pytest.mark.parametrize("name", [TINY, LARGE, RANDOM])
def test_the_configs_of_this_repository_hold_and_their_details_ask_for_no_change(name):
    checks = list(RULES.checks(composed(name)))
    require_checks(checks)
    assert [c for c in checks if not c.ok or re.search(r"\b(expected|change|add it)\b", c.detail)] == []


@pytest.mark.parametrize(("override", "side", "words"), [
    ("recipe.rollout.data_parallel_size=128", ROLLOUT_LAYOUT, r"2 .*dp 128.*= 512 ranks, expected all 256"),
    ("recipe.rollout.enable_expert_parallel=false", ROLLOUT_LAYOUT, "needs recipe.rollout.enable_expert_parallel=true"),
    ("recipe.train.layers_per_stage=[31,30]", TRAIN_LAYOUT, "must hold 8 counts"),
    (f"{ACTOR}.expert_tensor_parallel_size=4", TRAIN_LAYOUT, "must divide world_size.*n_gpus_per_node 16 = 256"),
])  # fmt: skip
def test_ranks_that_cannot_be_split_as_the_config_says_are_no_run(override, side, words):
    with pytest.raises(LayoutError, match=words) as refused:
        composed(LARGE, [override])
    assert refused.value.side == side


@pytest.fixture
def folders(tmp_path):
    """Return the override that names a folder of the tiny model: in bf16, in FP8, of Megatron."""
    make_fp8_folder(tmp_path, tiny_config() | {"torch_dtype": "bfloat16"})
    convert(plan_conversion(open_source(tmp_path / "fp8"), parse_layout("tp2 @2")), tmp_path / "megatron")
    return {name: [f"actor_rollout_ref.model.path={tmp_path / name}"] for name in ("plain", "fp8", "megatron")}


def weights_check(*overrides):
    (found,) = (c for c in folder_checks(composed(TINY, overrides)) if c.name == "model weights")
    return found.ok, found.detail


def test_fp8_and_sharded_weights_are_refused_only_where_vllm_would_read_them(folders, tmp_path):
    auto, init = f"{SAMPLING}.load_format=auto", "actor_rollout_ref.actor.load_weight=false"
    kinds = {
        "plain": "a HF folder",
        "fp8": r"a HF folder in FP8 \(blocks of 128 x 128\)",
        "megatron": "a Megatron folder",
    }
    for name, words in kinds.items():
        ok, detail = weights_check(*folders[name])
        assert ok and re.fullmatch(f"complete files: {words}", detail)
        for more in ([], [init]):
            ok, detail = weights_check(*folders[name], auto, *more)
            assert ok is (name == "plain")
            assert ok or re.search(f"load_format is auto, .*{words}; expected dummy_megatron", detail), detail
    checks = folder_checks(composed(TINY, [*folders["fp8"], init]))
    assert "model weights" not in {c.name for c in checks}  # a run with random init reads no weights
    file = tmp_path / "fp8" / "model-2.safetensors"  # other faults of a folder: tests/weights/test_convert.py
    file.write_bytes(file.read_bytes()[:-1])
    assert "model-2.safetensors is not a whole safetensors file" in weights_check(*folders["fp8"])[1]


def test_the_public_config_is_no_fault_of_weights_in_bf16(tmp_path):
    """Accept its fp8 entry, which conversion to bf16 by DeepSeek's own script leaves there."""
    (tmp_path / "config.json").write_text(PUBLIC.read_text())
    run = composed(LARGE, [f"actor_rollout_ref.model.path={tmp_path}"])
    found = {c.name: (c.ok, c.note) for c in folder_checks(run)}
    assert found == {"model shape": (True, False), "model weights": (True, True)}  # the folder has no weights
    assert "quantization_config" not in run.hf_config
    fault, *_ = failed_checks(folder_checks, composed(LARGE, [f"+{MODEL_CONFIG}.quantization_config=null"]))
    assert "expected no quantization_config" in fault


def test_a_checkpoint_that_is_not_whole_is_refused_before_the_start(tmp_path):
    saved = make_start(tmp_path / "t") / "checkpoints"
    given = [f"recipe.output_root={tmp_path}", "trainer.resume_mode=auto"]
    (saved / "global_step_3").mkdir(parents=True)
    (saved / "global_step_3" / "manifest.json").write_text("{}")
    (fault,) = failed_checks(rules.checkpoint_checks, composed(TINY, ["recipe.run=t", *given]))
    assert "global_step_3/manifest.json: expected format" in fault
    other = composed(TINY, ["recipe.run=other", given[0], "trainer.resume_mode=auto"])
    assert failed_checks(rules.checkpoint_checks, other) == []


def test_files_that_the_user_names_must_exist_and_be_whole(tmp_path):
    data, reward = tmp_path / "train.parquet", tmp_path / "reward.py"
    (tmp_path / "config.json").write_text(Path(CONFIGS_DIR, "model/deepseekv3_tiny.json").read_text())
    pq.write_table(pa.table({"prompt": ["a"]}), data)
    reward.write_text("def score(): ...")
    given = {
        "data.train_files": data,
        "data.val_files": f"[{data}]",
        "actor_rollout_ref.model.path": tmp_path,
        "recipe.rewards": f"[{{name: python, path: {reward}, function: score}}]",
    }

    def faults(of=with_required_files, **changed):
        run = of(composed(TINY, [f"{key}={value}" for key, value in {**given, **changed}.items()]))
        return {c.name: c.detail for rule in RULES.files for c in rule(run) if not c.ok}

    assert faults() == {}
    nowhere = dict.fromkeys(given, "/nowhere") | {"recipe.rewards": "[{name: python, path: /nowhere}]"}
    assert faults(**nowhere).keys() == {"model folder", "data", "hooks"}
    assert faults(lambda run: replace(run, given_keys=frozenset()), **nowhere) == {}  # plan for another machine
    data.write_bytes(data.read_bytes()[:-20])
    assert "train.parquet is cut off" in faults()["data"]
    data.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "train.parquet is a Git LFS pointer" in faults()["data"]
    (tmp_path / "tokenizer.json").write_text("<html>")
    assert "tokenizer.json is a web page" in faults()["model folder"]


def test_a_recording_without_a_step_is_refused(tmp_path):
    """Check the start; tests/trainer/test_worker_group.py has other faults of a recording."""
    for step in (1, 2, 3):
        save_file({"prompts": torch.ones(2), "responses": torch.ones(2)}, tmp_path / f"step_{step}.safetensors")
    run = composed(TINY, [f"recipe.rollout.replay={tmp_path}"])
    assert failed_checks(rules.recording_checks, run) == []
    (tmp_path / "step_2.safetensors").unlink()
    assert "this run has 3" in failed_checks(rules.recording_checks, run)[0]
