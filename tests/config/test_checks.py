import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from tests.weights.cases import make_fp8_folder
from verl_patches.config.checks import check_config
from verl_patches.config.compose import CONFIGS_DIR, compose, hf_config_of
from verl_patches.config.files import PATHS
from verl_patches.errors import ConfigError, require
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.tiny import tiny_config
from verl_patches.trainer.record import new_run_id
from verl_patches.weights.convert import convert
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.source import open_source

PUBLIC = Path(__file__).parents[1] / "layout" / "deepseek_v3_public_config.json"
TINY, LARGE, RANDOM = (
    "grpo_deepseekv3_tiny_cpu",
    "grpo_deepseekv3_256die_true_weight",
    "grpo_deepseekv3_256die_random_init",
)
ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
PPO, VLLM = "actor_rollout_ref.actor.ppo", f"{ROLLOUT}.engine_kwargs.vllm"
ASCEND = "recipe.rollout.ascend"
GRAPHS = f"{ASCEND}.graph_batch_sizes"


def failed(name, *overrides):
    return {c.name: c.detail for c in check_config(compose(name, overrides)) if not c.ok}


WHOLE_PROMPTS, NO_CHUNKS = f"{ASCEND}.scheduler=ascend", f"{ASCEND}.chunked_prefill_for_mla=false"
IN_CHUNKS = f"+{VLLM}.additional_config.ascend_scheduler_config.enable_chunked_prefill=true"
NO_GRAPHS = [f"{ASCEND}.{key}" for key in ("graphs=false", "multistream_mla=false", "multistream_moe=false")]
NO_GRAPHS += [f"{ASCEND}.view_optimize=true", f"{ASCEND}.graph_batch_sizes=null"]
BUDGET = f"{ROLLOUT}.max_num_batched_tokens"
# 8 ranks; rules of training do not hold then
EIGHT = "trainer.nnodes=1", "trainer.n_gpus_per_node=8", "recipe.rollout.instances=1", "recipe.rollout.dp=4"


@pytest.mark.parametrize(
    ("overrides", "detail"),
    [
        (["steps=[2]", "ranks=[2]"], "ranks: 2 is no rank; the run has ranks 0 to 1"),
        (["steps=[4]"], "4 comes after the last step, 3"),
        (["steps=[]"], "steps is empty"),
        (["steps=[1]", "ranks=[]"], "ranks is empty"),
        (["steps=[1,3]", "ranks=[0,1]", "phases=[update]"], None),
        (["ranks=[9]"], None),  # off
    ],
)
def test_profiles_of_ranks_and_steps_that_the_run_has_not_are_refused(overrides, detail):
    found = failed(TINY, *(f"recipe.profile.{override}" for override in overrides))
    assert detail in found["profile"] if detail else "profile" not in found
    if detail is None and "steps" in overrides[0]:
        skip = "recipe.train.skip_old_log_prob=true", "recipe.profile.phases=[old_log_prob]"
        assert "has no old_log_prob" in failed(TINY, "recipe.profile.steps=[1]", *skip)["profile"]


@pytest.mark.parametrize(
    ("overrides", "check", "detail"),
    [
        ([NO_CHUNKS, WHOLE_PROMPTS], "Ascend scheduler", r"1024, expected >= 4096 .* waits without end"),
        ([f"{BUDGET}=4096", WHOLE_PROMPTS], "Ascend scheduler", "chunked_prefill_for_mla .* expected one of the three"),
        ([f"{BUDGET}=4096", WHOLE_PROMPTS, f"{ASCEND}.prefix_caching=false"], "Ascend scheduler", None),
        ([f"{BUDGET}=4096", NO_CHUNKS, WHOLE_PROMPTS], "Ascend scheduler", None),
        ([WHOLE_PROMPTS, IN_CHUNKS], "Ascend scheduler", None),
        (["recipe.patches=[-rollout.ascend_decode_kv]"], "mixed batches", r"decode_kv is off .* would not be written"),
        (
            [f"{BUDGET}=4096", NO_CHUNKS, WHOLE_PROMPTS, "recipe.patches=[-rollout.ascend_decode_kv]"],
            "mixed batches",
            "expected recipe.patches without",
        ),
        ([*NO_GRAPHS, "recipe.patches=[-rollout.ascend_decode_kv]"], "mixed batches", None),
        ([f"{GRAPHS}=[64,128]"], "graph sizes", "holds 128, expected at most max_num_seqs 64"),
        ([f"{GRAPHS}=[8,64]"], "graph sizes", None),
        (
            [f"{ASCEND}.prefix_caching=false", "recipe.patches=[-rollout.llm_arguments]"],
            "prefix cache",
            "prefix_caching is false and row rollout.llm_arguments.* is off",
        ),
        ([f"{ASCEND}.prefix_caching=false"], "prefix cache", None),
        (["recipe.patches=[-rollout.ascend_expert_groups]"], "expert groups", None),  # 256 experts
        ([*EIGHT], "graphs", r"split over 8 ranks, expected at least 16.* all-to-all"),
        ([*EIGHT, "recipe.platform=npu_emulated"], "graphs", None),
        ([*EIGHT, "recipe.rollout.expert_parallel=false"], "graphs", None),
        ([], "graphs", None),  # 256 ranks
    ],
)
def test_what_vllm_ascend_would_compute_wrongly_is_refused(overrides, check, detail):
    found = failed(LARGE, *overrides)
    assert (check in found) == (detail is not None) and re.search(detail or "", found.get(check, "")), found


def test_groups_of_experts_that_vllm_ascend_ranks_wrongly_are_refused_without_the_row():
    tiny = ["recipe.line=a3", "recipe.platform=npu_emulated", "recipe.patches=[-rollout.ascend_expert_groups]"]
    assert re.search("16 routed experts in 4 groups", failed(TINY, *tiny)["expert groups"])
    assert "expert groups" not in failed(TINY, *tiny[:2])


@pytest.mark.parametrize("name", [TINY, LARGE, RANDOM])
def test_the_configs_of_this_repository_hold_and_their_details_ask_for_no_change(name):
    checks = check_config(compose(name))
    require(checks)
    assert [c for c in checks if not c.ok or re.search(r"\b(expected|change|add it)\b", c.detail)] == []


STAGES_OF_TINY = (
    f"{ACTOR}.pipeline_model_parallel_size=2",
    "recipe.train.layers_per_stage=[1,3]",
    "recipe.line=a3",
    "recipe.platform=cpu",
)


@pytest.mark.parametrize(("name", "overrides", "refused"), [
    (LARGE, ["recipe.train.layers_per_stage=[3,11,8,8,8,8,8,7]"], True),  # its update hangs, tried at ep2 pp2
    (LARGE, ["recipe.train.layers_per_stage=[4,10,8,8,8,8,8,7]"], False),
    (TINY, [*STAGES_OF_TINY, "trainer.n_gpus_per_node=4"], True),
    (TINY, [*STAGES_OF_TINY, f"{ACTOR}.expert_model_parallel_size=1"], False),  # one optimizer, one reduction
])  # fmt: skip
def test_a_stage_without_experts_is_refused_on_line_a3(name, overrides, refused):
    found = failed(name, *overrides)
    assert ("layers" in found) == refused and (not refused or "stage 0 has no layer with experts" in found["layers"])


# faults that do not affect each other are given together: {override: (check that must fail, its detail)}
FAULTS = [
    (
        LARGE,
        {
            "recipe.train.layers_per_stage=[8,8,8,8,8,8,8,7]": ("layers", "63.*61"),
            f"{ACTOR}.expert_model_parallel_size=2": ("recipe.train.expert_split", "multiple of tp 4; found 1 and 2"),
            "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4": ("actor = ref", "8 != 4"),
            "recipe.rollout.dp=128": ("rollout layout", r"2 .*dp 128.*= 512 ranks, expected all 256"),
            f"{ROLLOUT}.enable_chunked_prefill=true": ("chunked prefill", "1024, expected >= 203072"),
            "data.max_prompt_length=200000": ("lengths", "model reaches 163840"),
            "recipe.logprob_check.sequences=100": ("truth check", "multiple of 128"),
            "+actor_rollout_ref.model.override_config.model_config.quantization_config=null": (
                "model folder",
                "expected none",
            ),
        },
    ),
    (
        LARGE,
        {
            "recipe.train.layers_per_stage=[31,30]": ("train layout", "must hold 8 counts"),
            f"{VLLM}.enable_expert_parallel=false": ("engine_kwargs.vllm", "False, expected True"),
        },
    ),
    (
        LARGE,
        {
            "data.train_batch_size=500": ("prompts", "500 is not a multiple of 256"),
            f"{PPO}_mini_batch_size=300": ("mini batch", "500 is not a multiple of 300"),
            f"{PPO}_micro_batch_size_per_gpu=7": ("micro batch", "600 is not a multiple of 7"),
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7": (
                "ref micro batch",
                "1000 is not a multiple of 7",
            ),
            f"{VLLM}.max_num_seqs=2048": ("max_num_seqs", "expected <= max_num_batched_tokens 1024"),
            f"{GRAPHS}=[1,32]": ("graph batch sizes", "largest graph 32, expected at least the 63"),
            "recipe.reshard.bucket_bytes=1000": ("weight sync", "at least 14336, one row of model.*, found 1000"),
        },
    ),
    (
        LARGE,
        {
            f"{ACTOR}.expert_tensor_parallel_size=4": ("train layout", "must divide world_size"),
            "recipe.rollout.expert_parallel=false": ("rollout layout", "needs recipe.rollout.expert_parallel=true"),
        },
    ),
    (
        TINY,
        {
            f"{ACTOR}.tensor_model_parallel_size=2": ("experts under tp", "expected ep > 1 or etp = tp at tp 2"),
            f"{ACTOR}.expert_model_parallel_size=1": ("experts under tp", "expected ep > 1 or etp = tp at tp 2"),
        },
    ),
    (
        TINY,
        {
            f"{ROLLOUT}.max_num_batched_tokens=128": ("prefill", "128, expected >= 272"),
            "recipe.rollout.expert_parallel=true": ("expert parallel", "found 1 rank an instance"),
            "data.train_batch_size=5": ("prompts", "5 is not a multiple of 2"),
        },
    ),
    (
        TINY,
        {
            "trainer.save_freq=1": ("checkpoints", "each rank saves its own states"),
            "algorithm.adv_estimator=gae": ("line pypi", "Instead: algorithm.adv_estimator=grpo"),
            "trainer.default_hdfs_dir=hdfs://x": ("checkpoints", "expected null"),
            f"{ACTOR}.use_distributed_optimizer=false": ("checkpoints", "expected true: each rank saves"),
        },
    ),
    (
        TINY,
        {
            "trainer.resume_mode=auto": ("checkpoints", "rank 0 only"),
            "recipe.patches=[-checkpoint.*]": ("checkpoints", "checkpoint.parts, checkpoint.save, checkpoint.load"),
        },
    ),
    (  # 512 dies: one expert would be split over two ranks
        RANDOM,
        {
            "trainer.nnodes=32": ("rollout experts", "256 routed experts over 512 ranks"),
            "recipe.rollout.dp=256": ("rollout experts", "256 routed experts over 512 ranks"),
            "recipe.logprob_check={action: stop, every: 10}": ("truth check", "balanced routing"),
        },
    ),
]


@pytest.mark.parametrize(("name", "faults"), FAULTS)
def test_each_fault_is_named_with_expected_and_found(name, faults):
    checks = check_config(compose(name, list(faults)))
    found = {c.name: c.detail for c in checks if not c.ok}
    for check, message in faults.values():
        assert re.search(message, found[check]), found
    with pytest.raises(ConfigError) as error:
        require(checks)
    assert all(f"{check}: " in str(error.value) for check in found)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (LARGE, ("recipe.reshard.bucket_bytes=1000", "recipe.patches=[-reshard.*]")),
        (LARGE, ("recipe.reshard.bucket_bytes=1000", "recipe.patches=[-reshard.direct]")),
        (TINY, ("trainer.save_freq=1",)),
        (TINY, ("trainer.save_freq=1", "recipe.patches=[-checkpoint.*]", f"{ACTOR}.expert_model_parallel_size=1")),
    ],
)
def test_rules_of_features_that_are_off_do_not_apply(name, overrides):
    assert not failed(name, *overrides).keys() & {"weight sync", "checkpoints"}


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


def test_fp8_and_sharded_weights_are_refused_only_where_vllm_would_read_them(folders):
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


def test_weights_that_cannot_be_loaded_are_refused_by_name(tmp_path, folders):
    """Before a start; tests/weights/test_convert.py has the other faults that `open_source` finds."""
    file = tmp_path / "fp8" / "model-2.safetensors"
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
    saved = tmp_path / "t" / "checkpoints"
    given = [f"recipe.output_root={tmp_path}", "recipe.run=t", f"trainer.resume_mode={mode}"]
    given.append(f"trainer.resume_from_path={saved / 'global_step_3'}")
    (saved / "global_step_3").mkdir(parents=True)
    (saved / "global_step_3" / "manifest.json").write_text("{}")
    new_run_id(tmp_path / "t", "t")
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
        "custom_reward_function.path": reward,
        "custom_reward_function.name": "score",
    }

    def faults(must_exist=PATHS, **changed):
        overrides = [f"{key}={value}" for key, value in {**given, **changed}.items()]
        return {c.name: c.detail for c in check_config(compose(TINY, overrides), must_exist) if not c.ok}

    assert faults() == {}
    nowhere = dict.fromkeys(given.keys() - {"custom_reward_function.name"}, "/nowhere")
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
    override = f"+actor_rollout_ref.model.override_config.model_config.{key}={value}"
    assert re.search(words, failed(name, override)["model config"])


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


REPLAY, SKIP = "recipe.train.routing_replay", "recipe.train.skip_old_log_prob"


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        (TINY, [f"{REPLAY}=R2"], None),
        (LARGE, [f"{REPLAY}=R2", f"{SKIP}=false"], None),
        (LARGE, [f"{REPLAY}=R2", f"{SKIP}=true"], "R2, but .*skip_old_log_prob leaves out the pass that records"),
        (RANDOM, [f"{REPLAY}=R2", f"{SKIP}=false"], "balanced_routing ignores the router"),
        (TINY, [f"{REPLAY}=R2", "recipe.patches=[-update.routing_replay]"], "row update.routing_replay is off"),
    ],
)
def test_routing_replay_is_refused_where_it_would_not_act(name, overrides, words):
    found = failed(name, *overrides).get("routing replay")
    assert found is None if words is None else re.search(words, found), found
