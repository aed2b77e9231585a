import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from tests.weights.cases import make_fp8_folder, make_start
from verl_patches.config.checks import check_config
from verl_patches.config.compose import CONFIGS_DIR, compose, hf_config_of
from verl_patches.config.files import PATHS
from verl_patches.errors import ConfigError, require
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.tiny import tiny_config
from verl_patches.weights.convert import convert
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.source import open_source

PUBLIC = Path(__file__).parents[1] / "layout" / "deepseek_v3_public_config.json"
TINY, LARGE, RANDOM = ("deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight", "deepseekv3_256die_random_init")
ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
MODEL_CONFIG = "actor_rollout_ref.model.override_config.model_config"
PPO, VLLM = "actor_rollout_ref.actor.ppo", f"{ROLLOUT}.engine_kwargs.vllm"
ASCEND = "recipe.rollout.ascend"
GRAPHS = f"{ASCEND}.graph_batch_sizes"


@pytest.mark.parametrize(("override", "check", "detail"), [
    ("critic.use_dynamic_bsz=true", "critic", "critic does not read it"),
    ("critic.rollout_n=3", "critic", "expected actor_rollout_ref.rollout.n, 2"),
    ("critic.ppo_micro_batch_size_per_gpu=null", "critic micro batch", "is null; verl needs it"),
    ("critic.ppo_micro_batch_size_per_gpu=3", "critic micro batch", "not a multiple of 3"),
    ("critic.ppo_mini_batch_size=3", "critic mini batch", "not a multiple of 3"),
    ("critic.load_weight=false", "critic", "load_weight must be true"),
    ("recipe.patches=[-update.recipe_critic]", "critic", "verl's own critic"),
    ("critic.megatron.expert_model_parallel_size=1", "actor = critic", "expert_model_parallel_size 2 != 1"),
    ("critic.megatron.use_distributed_optimizer=false", "optimizer", "critic.megatron.use_distributed_optimizer"),
    ("critic.optim.lr=1e-4", None, ""),  # its own
])  # fmt: skip
def test_what_a_critic_cannot_do_is_refused_where_there_is_one(override, check, detail):
    found = failed(TINY, "algo=ppo", override)
    if check is None:
        assert not {name for name in found if "critic" in name}
    else:
        assert detail in found[check]
    without = failed(TINY, override)
    assert not {name for name in without if "critic" in name} and "critic" not in without.get("optimizer", "")


def failed(name, *overrides):
    return {c.name: c.detail for c in check_config(compose(name, overrides)) if not c.ok}


WHOLE_PROMPTS, NO_CHUNKS = f"{ASCEND}.scheduler=ascend", f"{ASCEND}.chunked_prefill_for_mla=false"
IN_CHUNKS = f"+{VLLM}.additional_config.ascend_scheduler_config.enable_chunked_prefill=true"
NO_GRAPHS = [f"{ASCEND}.{key}" for key in ("graphs=false", "multistream_mla=false", "multistream_moe=false")]
NO_GRAPHS += [f"{ASCEND}.view_optimize=true", f"{ASCEND}.graph_batch_sizes=null"]
BUDGET, NO_PREFIX = f"{ROLLOUT}.max_num_batched_tokens", f"{ASCEND}.prefix_caching=false"
ALONE = f"{ACTOR}.expert_model_parallel_size=1"
# 8 ranks; rules of training do not hold then
EIGHT = "trainer.nnodes=1", "trainer.n_gpus_per_node=8", "recipe.rollout.instances=1", "recipe.rollout.dp=4"
PROFILE = "recipe.profile.{}".format
NO_ROW_FOR_KV, NO_ROW_FOR_GROUPS = (f"recipe.patches=[-rollout.ascend_{row}]" for row in ("decode_kv", "expert_groups"))
EMULATED = "recipe.line=a3", "recipe.platform=npu_emulated"
STAGES_OF_TINY = f"{ACTOR}.pipeline_model_parallel_size=2", "recipe.train.layers_per_stage=[1,3]", "recipe.line=a3"
STAGES = "recipe.train.layers_per_stage=[{},8,8,8,8,8,7]".format
REPLAY, SKIP = "recipe.train.routing_replay=R2", "recipe.train.skip_old_log_prob"
RECOMPUTE = "actor_rollout_ref.model.enable_gradient_checkpointing=true"


def recomputed(method, layers=0, model="actor_rollout_ref"):
    settings = {"granularity": "full", "method": method, "num_layers": layers}
    key = f"++{model}.model.gradient_checkpointing_kwargs.activations_checkpoint"
    return [f"{key}_{name}={value}" for name, value in settings.items()]


LOG_PROB = f"{ROLLOUT}.log_prob_micro_batch_size"
ENDLESS = [RECOMPUTE, *recomputed("uniform")]
ENDLESS_CRITIC = [RECOMPUTE, "algo=ppo", *recomputed("block"), *recomputed("uniform", model="critic")]
SMALL_BUCKETS = "recipe.reshard.bucket_bytes=1000"


# the detail of the check that fails; None: it must not fail
@pytest.mark.parametrize(("name", "check", "overrides", "detail"), [
    (TINY, "profile", [PROFILE("steps=[2]"), PROFILE("ranks=[2]")], "2 is no rank; the run has ranks 0 to 1"),
    (TINY, "profile", [PROFILE("steps=[4]")], "4 comes after the last step, 3"),
    (TINY, "profile", [PROFILE("steps=[]")], "steps is empty"),
    (TINY, "profile", [PROFILE("steps=[1]"), PROFILE("ranks=[]")], "ranks is empty"),
    (TINY, "profile", [PROFILE("steps=[1]"), PROFILE("phases=[old_log_prob]"), f"{SKIP}=true"], "has no old_log_prob"),
    (TINY, "profile", [PROFILE("steps=[1]"), PROFILE("phases=[values]")], "has no values, by"),
    (TINY, "profile", [PROFILE("steps=[1]"), PROFILE("phases=[values]"), "algo=ppo"], None),
    (TINY, "profile", [PROFILE("steps=[1,3]"), PROFILE("ranks=[0,1]"), PROFILE("phases=[update]")], None),
    (TINY, "profile", [PROFILE("ranks=[9]")], None),  # off
    (LARGE, "Ascend scheduler", [NO_CHUNKS, WHOLE_PROMPTS], r"1024, expected >= 4096 .* waits without end"),
    (LARGE, "Ascend scheduler", [f"{BUDGET}=4096", WHOLE_PROMPTS], "chunked_prefill_for_mla .* one of the three"),
    (LARGE, "Ascend scheduler", [f"{BUDGET}=4096", WHOLE_PROMPTS, NO_PREFIX], None),
    (LARGE, "Ascend scheduler", [f"{BUDGET}=4096", WHOLE_PROMPTS, NO_CHUNKS], None),
    (LARGE, "Ascend scheduler", [WHOLE_PROMPTS, IN_CHUNKS], None),
    (LARGE, "mixed batches", [NO_ROW_FOR_KV], r"decode_kv is off .* would not be written"),
    (LARGE, "mixed batches", [NO_ROW_FOR_KV, f"{BUDGET}=4096", NO_CHUNKS, WHOLE_PROMPTS], "recipe.patches without"),
    (LARGE, "mixed batches", [NO_ROW_FOR_KV, *NO_GRAPHS], None),
    (LARGE, "graph sizes", [f"{GRAPHS}=[64,128]"], "holds 128, expected at most max_num_seqs 64"),
    (LARGE, "graph sizes", [f"{GRAPHS}=[8,64]"], None),
    (LARGE, "prefix cache", [NO_PREFIX, "recipe.patches=[-rollout.llm_arguments]"], r"row rollout.llm_arguments.* off"),
    (LARGE, "prefix cache", [NO_PREFIX], None),
    (TINY, "expert groups", [*EMULATED, NO_ROW_FOR_GROUPS], "16 routed experts in 4 groups"),
    (TINY, "expert groups", EMULATED, None),
    (LARGE, "expert groups", [NO_ROW_FOR_GROUPS], None),  # 256 experts
    (LARGE, "graphs", EIGHT, r"split over 8 ranks, expected at least 16.* all-to-all"),
    (LARGE, "graphs", [*EIGHT, "recipe.platform=npu_emulated"], None),
    (LARGE, "graphs", [*EIGHT, "recipe.rollout.expert_parallel=false"], None),
    (LARGE, "graphs", [], None),  # 256 ranks
    (LARGE, "layers", [STAGES("3,11")], "stage 0 has no layer with experts"),  # its update hangs, tried at ep2 pp2
    (LARGE, "layers", [STAGES("4,10")], None),
    (TINY, "layers", [*STAGES_OF_TINY, "trainer.n_gpus_per_node=4"], "stage 0 has no layer with experts"),
    (TINY, "layers", [*STAGES_OF_TINY, ALONE], None),  # one optimizer, one reduction
    (LARGE, "weight sync", [SMALL_BUCKETS, "recipe.patches=[-reshard.*]"], None),  # rules of features that are off
    (LARGE, "weight sync", [SMALL_BUCKETS, "recipe.patches=[-reshard.direct]"], None),
    (TINY, "checkpoints", ["trainer.save_freq=1"], None),
    (TINY, "checkpoints", ["trainer.save_freq=1", "recipe.patches=[-checkpoint.*]", ALONE], None),
    (TINY, "rollout micro batch", [f"{LOG_PROB}=8", f"{LOG_PROB}_per_gpu=null"], "which plans read"),  # verl takes it
    (TINY, "recomputation", ENDLESS, "actor_rollout_ref.model: .*num_layers=0 needs .*method=block"),
    (TINY, "recomputation", [*ENDLESS, "recipe.line=a3"], "would not end"),
    (TINY, "recomputation", ENDLESS_CRITIC, "critic.model: .*num_layers=0"),
    (TINY, "recomputation", [RECOMPUTE, *recomputed("block")], None),
    (TINY, "recomputation", [RECOMPUTE, *recomputed("uniform", 1)], None),
    (TINY, "recomputation", recomputed("uniform"), None),  # off
    (TINY, "routing replay", [REPLAY], None),
    (LARGE, "routing replay", [REPLAY, f"{SKIP}=false"], None),
    (LARGE, "routing replay", [REPLAY, f"{SKIP}=true"], "skip_old_log_prob leaves out the pass that records"),
    (RANDOM, "routing replay", [REPLAY, f"{SKIP}=false"], "balanced_routing ignores the router"),
    (TINY, "routing replay", [REPLAY, "recipe.patches=[-update.routing_replay]"], "row update.routing_replay is off"),
])  # fmt: skip
def test_what_would_fail_or_compute_wrongly_is_refused_by_its_check(name, check, overrides, detail):
    found = failed(name, *overrides)
    assert (check in found) == (detail is not None) and re.search(detail or "", found.get(check, "")), found


@pytest.mark.parametrize("name", [TINY, LARGE, RANDOM])
def test_the_configs_of_this_repository_hold_and_their_details_ask_for_no_change(name):
    checks = check_config(compose(name))
    require(checks)
    assert [c for c in checks if not c.ok or re.search(r"\b(expected|change|add it)\b", c.detail)] == []


# faults that do not affect each other are given together: (override, check that must fail, its detail)
@pytest.mark.parametrize(("name", "faults"), [
    (LARGE, [
        ("recipe.train.layers_per_stage=[8,8,8,8,8,8,8,7]", "layers", "63.*61"),
        (f"{ACTOR}.expert_model_parallel_size=2", "recipe.train.expert_split", "multiple of tp 4; found 1 and 2"),
        ("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4", "actor = ref", "8 != 4"),
        ("recipe.rollout.dp=128", "rollout layout", r"2 .*dp 128.*= 512 ranks, expected all 256"),
        (f"{ROLLOUT}.enable_chunked_prefill=true", "chunked prefill", "1024, expected >= 203072"),
        ("data.max_prompt_length=200000", "lengths", "model reaches 163840"),
        ("recipe.logprob_check.sequences=100", "truth check", "multiple of 128"),
        (f"+{MODEL_CONFIG}.quantization_config=null", "model folder", "expected none"),
    ]),
    (LARGE, [
        ("recipe.train.layers_per_stage=[31,30]", "train layout", "must hold 8 counts"),
        (f"{VLLM}.enable_expert_parallel=false", "engine_kwargs.vllm", "False, expected True"),
    ]),
    (LARGE, [
        ("data.train_batch_size=500", "prompts", "500 is not a multiple of 256"),
        (f"{PPO}_mini_batch_size=300", "actor mini batch", "500 is not a multiple of 300"),
        (f"{PPO}_micro_batch_size_per_gpu=7", "actor micro batch", "600 is not a multiple of 7"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7", "ref micro batch", "1000 is not a multiple of 7"),
        (f"{VLLM}.max_num_seqs=2048", "max_num_seqs", "expected <= max_num_batched_tokens 1024"),
        (f"{GRAPHS}=[1,32]", "graph batch sizes", "largest graph 32, expected at least the 63"),
        (SMALL_BUCKETS, "weight sync", "at least 14336, one row of model.*, found 1000"),
    ]),
    (LARGE, [
        (f"{ACTOR}.expert_tensor_parallel_size=4", "train layout", "must divide world_size"),
        ("recipe.rollout.expert_parallel=false", "rollout layout", "needs recipe.rollout.expert_parallel=true"),
    ]),
    (TINY, [
        (f"{ACTOR}.tensor_model_parallel_size=2", "experts under tp", "expected ep > 1 or etp = tp at tp 2"),
        (ALONE, "experts under tp", "expected ep > 1 or etp = tp at tp 2"),
    ]),
    (TINY, [
        (f"{BUDGET}=128", "prefill", "128, expected >= 272"),
        ("recipe.rollout.expert_parallel=true", "expert parallel", "found 1 rank an instance"),
        ("data.train_batch_size=5", "prompts", "5 is not a multiple of 2"),
    ]),
    (TINY, [
        ("trainer.save_freq=1", "checkpoints", "files go to trainer.default_local_dir"),
        ("critic.optim.warmup_style=cosine", "line pypi", "Instead: a constant critic.optim.lr"),
        ("trainer.default_hdfs_dir=hdfs://x", "checkpoints", "expected null"),
        (f"{ACTOR}.use_distributed_optimizer=false", "optimizer", "expected true: each rank"),
    ]),
    (TINY, [
        ("trainer.resume_mode=auto", "checkpoints", "rank 0 only"),
        ("recipe.patches=[-checkpoint.*]", "checkpoints", "checkpoint.parts, checkpoint.save, checkpoint.load"),
    ]),
    (RANDOM, [  # 512 dies: one expert would be split over two ranks
        ("trainer.nnodes=32", "rollout experts", "256 routed experts over 512 ranks"),
        ("recipe.rollout.dp=256", "rollout experts", "256 routed experts over 512 ranks"),
        ("recipe.logprob_check={action: stop, every: 10}", "truth check", "balanced routing"),
    ]),
])  # fmt: skip
def test_each_fault_is_named_with_expected_and_found(name, faults):
    checks = check_config(compose(name, [override for override, *_ in faults]))
    found = {c.name: c.detail for c in checks if not c.ok}
    assert [check for _, check, message in faults if not re.search(message, found.get(check, ""))] == [], found
    with pytest.raises(ConfigError) as error:
        require(checks)
    assert all(f"{check}: " in str(error.value) for check in found)


BY_VLLM = f"{ASCEND}.vllm_sleep_mode=true"
CACHED_GRAPH = f"+{VLLM}.additional_config.torchair_graph_config.use_cached_graph=true"


@pytest.mark.parametrize(
    ("name", "overrides", "ok", "detail"),
    [
        (TINY, [], True, "to torch's pool"),
        (TINY, [f"{ROLLOUT}.enforce_eager=false"], False, "sleep mode.* on a CPU; expected .*enforce_eager=true"),
        (TINY, ["recipe.patches=[-memory.*]"], False, "on a CPU; expected .*without -memory.sleep_mode"),
        (LARGE, [BY_VLLM], True, "addresses that graphs captured"),
        (LARGE, [BY_VLLM, "recipe.patches=[-memory.sleep_mode]"], True, "memory.sleep_mode is off: vLLM copies all"),
        (LARGE, [], True, "to torch's pool"),
        (LARGE, ["recipe.patches=[-memory.graph_addresses]"], False, "graph_addresses is off; expected true"),
        (LARGE, ["recipe.patches=[-memory.sleep_mode]"], False, "memory.sleep_mode is off; expected true"),
        (LARGE, [CACHED_GRAPH], False, "use_cached_graph is set, whose graphs no row changes; expected true"),
    ],
)
def test_sleep_of_the_rollout_is_described_and_refused_where_it_cannot_work(name, overrides, ok, detail):
    checks = check_config(compose(name, overrides))
    (found,) = (check for check in checks if check.name == "rollout memory")
    assert found.ok is ok and re.search(detail, found.detail), found
    assert found.note == (BY_VLLM in overrides) and found.note == ("on several nodes it may free" in found.detail)


def test_every_graph_is_named_with_the_time_to_compile_it():
    (found,) = (check for check in check_config(compose(LARGE)) if check.name == "graph batch sizes")
    assert "graphs of 8, 16, 32, 64" in found.detail and "2 to 6 minutes to compile at the start" in found.detail
    assert "graph batch sizes" not in {check.name for check in check_config(compose(LARGE, NO_GRAPHS))}


@pytest.fixture
def folders(tmp_path):
    """The override that names a folder of the tiny model: in bf16, in FP8, in shards."""
    make_fp8_folder(tmp_path, tiny_config() | {"torch_dtype": "bfloat16"})
    convert(plan_conversion(open_source(tmp_path / "fp8"), parse_layout("tp2 @2")), tmp_path / "shards")
    return {name: [f"actor_rollout_ref.model.path={tmp_path / name}"] for name in ("plain", "fp8", "shards")}


def weights_check(*overrides):
    (found,) = (c for c in check_config(compose(TINY, overrides)) if c.name == "model weights")
    return found.ok, found.detail


def test_fp8_and_sharded_weights_are_refused_only_where_vllm_would_read_them(folders, tmp_path):
    auto, init = f"{ROLLOUT}.load_format=auto", "actor_rollout_ref.actor.load_weight=false"
    kinds = {"plain": "a HF folder", "fp8": r"a HF folder in FP8 \(blocks of 128 x 128\)", "shards": "sharded weights"}
    for name, words in kinds.items():
        ok, detail = weights_check(*folders[name])
        assert ok and re.fullmatch(f"whole files: {words}", detail)
        for more in ([], [init]):
            ok, detail = weights_check(*folders[name], auto, *more)
            assert ok is (name == "plain")
            assert ok or re.search(f"load_format is auto, .*{words}; expected dummy_megatron", detail), detail
    checks = check_config(compose(TINY, [*folders["fp8"], init]))
    assert "model weights" not in {c.name for c in checks}  # random init reads none
    file = tmp_path / "fp8" / "model-2.safetensors"  # other faults of a folder: tests/weights/test_convert.py
    file.write_bytes(file.read_bytes()[:-1])
    assert "model-2.safetensors: not a whole safetensors file" in weights_check(*folders["fp8"])[1]


def test_the_public_config_is_no_fault_of_weights_in_bf16(tmp_path):
    """It has an fp8 entry, which conversion to bf16 by DeepSeek's own script leaves there."""
    (tmp_path / "config.json").write_text(PUBLIC.read_text())
    folder = f"actor_rollout_ref.model.path={tmp_path}"
    config = compose(LARGE, [folder])
    found = {c.name: (c.ok, c.note) for c in check_config(config) if c.name.startswith("model")}
    assert found["model shape"] == (True, False) and found["model weights"] == (True, True)  # there are none
    assert "quantization_config" not in hf_config_of(config)


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_checkpoint_that_is_not_whole_is_refused_before_the_start(tmp_path, mode):
    saved = make_start(tmp_path / "t") / "checkpoints"
    given = [f"recipe.output_root={tmp_path}", "recipe.run=t", f"trainer.resume_mode={mode}"]
    given.append(f"trainer.resume_from_path={saved / 'global_step_3'}")
    (saved / "global_step_3").mkdir(parents=True)
    (saved / "global_step_3" / "manifest.json").write_text("{}")
    assert "global_step_3/manifest.json: expected format" in failed(TINY, *given)["checkpoints"]
    assert "checkpoints" not in failed(TINY, *given[:1], "recipe.run=other", "trainer.resume_mode=auto")


@pytest.mark.parametrize(("name", "override", "words"), [
    (TINY, "recipe.dtype=fp32", "all sampled tokens of every step"),
    (TINY, f"{ROLLOUT}.temperature=0.7", "never compared: sampling changes .*every=N"),
    (LARGE, "recipe.dtype=bf16", "from step 1 every 10: 128 x 256 tokens"),
    (RANDOM, "recipe.dtype=bf16", "never compared: recipe.logprob_check.action=off"),
])  # fmt: skip
def test_the_plan_says_whether_log_probs_are_compared(name, override, words):
    (check,) = (c for c in check_config(compose(name, [override])) if c.name == "truth check")
    assert check.ok and check.note is ("never" in words) and re.search(words, check.detail), check


OLD_KEYS = {"actor.ppo_micro_batch_size", "rollout.log_prob_micro_batch_size", "ref.log_prob_micro_batch_size"}


@pytest.mark.parametrize("line", ["pypi", "a3"])
def test_a_micro_batch_of_all_ranks_is_refused_as_verl_would_after_ray_has_started(line):
    """Where verl looks: not with dynamic batches, and at the reference's where there is one."""
    keys = {f"actor_rollout_ref.{key}" for key in OLD_KEYS}
    of_reference = {key for key in keys if ".ref." in key}

    def refused(reference, *overrides):
        given = [
            f"recipe.line={line}",
            f"actor_rollout_ref.actor.use_kl_loss={reference}",
            *(f"{key}=4" for key in keys),
        ]
        found = check_config(compose(TINY, [*given, *overrides]))
        return {c.detail.partition(" is given")[0] for c in found if not c.ok and "_per_gpu alone" in c.detail}

    assert refused("true") == keys and refused("false") == keys - of_reference
    assert refused("true", "actor_rollout_ref.actor.use_dynamic_bsz=true") == set()


def test_files_that_the_user_names_must_exist_and_be_whole(tmp_path):
    data, reward = tmp_path / "train.parquet", tmp_path / "reward.py"
    (tmp_path / "config.json").write_text(Path(CONFIGS_DIR, "model/deepseekv3_tiny.json").read_text())
    prompt = [{"role": "user", "content": "a"}]
    rows = {"prompt": [prompt] * 4, "data_source": ["b"] * 4, "reward_model": [{"ground_truth": "1"}] * 4}
    pq.write_table(pa.table(rows), data)
    reward.write_text("def score(): ...")
    given = {
        "data.train_files": data,
        "data.val_files": f"[{data}]",
        "actor_rollout_ref.model.path": tmp_path,
        "recipe.rewards": f"[{{name: python, path: {reward}, function: score}}]",
    }

    def faults(must_exist=PATHS, **changed):
        overrides = [f"{key}={value}" for key, value in {**given, **changed}.items()]
        return {c.name: c.detail for c in check_config(compose(TINY, overrides), must_exist) if not c.ok}

    assert faults() == {}
    nowhere = dict.fromkeys(given, "/nowhere") | {"recipe.rewards": "[{name: python, path: /nowhere}]"}
    assert faults(**nowhere).keys() == {"model folder", "data", "hooks"} and faults((), **nowhere) == {}
    tables = {
        "column prompt or data_source or reward_model is missing": {"question": ["a"] * 4},
        "column prompt is missing or of another type": {**rows, "prompt": ["a"] * 4},
        "data.train_files: 3 prompts; expected at least 4": {name: values[:3] for name, values in rows.items()},
    }
    for words, table in tables.items():
        pq.write_table(pa.table(table), data)
        assert words in faults()["data"]
    pq.write_table(pa.table(rows), data)
    pq.write_table(pa.table(rows)[:0], tmp_path / "empty.parquet")
    changed = {"data.val_files": tmp_path / "empty.parquet"}
    assert faults(**changed) == {"data": "data.val_files: 0 prompts; expected at least 1"}
    data.write_bytes(data.read_bytes()[:-20])
    assert "train.parquet is not a whole parquet file" in faults()["data"]


@pytest.mark.parametrize(("key", "value", "words"), [
    ("num_nextn_predict_layers", 1, "num_nextn_predict_layers is 1; expected 0"),
    ("topk_method", "greedy", "topk_method is 'greedy'; expected 'noaux_tc'"),
    ("scoring_func", "softmax", "scoring_func is 'softmax'; expected 'sigmoid'"),
    ("n_shared_experts", 0, "n_shared_experts is 0; expected at least 1"),
    ("rope_theta", "x", "rope_theta is 'x'; expected a number > 0"),
    ("n_group", 3, "n_group is 3 and topk_group .; expected a divisor of (16|256), and 1 to n_group"),
    ("n_routed_experts", 32, r"n_routed_experts 32 \(expected (16|256)\)"),
    ("hidden_size", "x", "hidden_size is 'x'; expected a whole number"),
])  # fmt: skip
@pytest.mark.parametrize("name", [TINY, LARGE])
def test_a_model_that_training_would_compute_wrongly_is_refused(name, key, value, words):
    assert re.search(words, failed(name, f"+{MODEL_CONFIG}.{key}={value}")["model config"])


def test_a_damaged_recording_is_refused(tmp_path):
    """tests/trainer/test_worker_group.py has the other faults of a recording."""
    for step in (1, 2, 3):
        save_file({"prompts": torch.ones(2), "responses": torch.ones(2)}, tmp_path / f"step_{step}.safetensors")
    override, file = f"recipe.rollout.replay={tmp_path}", tmp_path / "step_2.safetensors"
    assert failed(TINY, override) == {}
    file.write_bytes(file.read_bytes()[:-3])
    assert "step_2.safetensors: not a whole" in failed(TINY, override)["replay"]
    file.unlink()
    assert "this run wants 3" in failed(TINY, override)["replay"]
