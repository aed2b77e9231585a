import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from verl_patches.config.checks import check_config, require
from verl_patches.config.compose import compose, hf_config_of
from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import rollout_layout_of, train_layout_of

PUBLIC = "deepseek_v3_public_config.json"
TINY, LARGE = "grpo_deepseekv3_tiny_cpu", "grpo_deepseekv3_256die_true_weight"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"


def failed(name, *overrides):
    return {c.name: c.detail for c in check_config(compose(name, overrides)) if not c.ok}


@pytest.mark.parametrize("name", [TINY, LARGE, "grpo_deepseekv3_256die_random_init"])
def test_the_configs_of_this_repository_hold(name):
    assert failed(name) == {}


def test_what_holds_gives_no_orders():
    """An ok row says what holds; what to do stands in failed ones only."""
    for name in (LARGE, TINY):
        held = [check for check in check_config(compose(name)) if check.ok]
        assert [c for c in held if re.search(r"\b(expected|change|add it)\b", c.detail)] == []
    whole = next(c for c in check_config(compose(LARGE)) if c.name == "experts under tp")
    assert whole.detail == "experts are whole, 32 ranks share them"  # as recipe.train.expert_split says below it


# faults that do not touch each other are planted together: one composition, every one of them must be named
FAULTS = [
    (
        LARGE,
        {
            "recipe.train.layers_per_stage=[8,8,8,8,8,8,8,7]": ("layers", "63.*61"),
            f"{ACTOR}.expert_model_parallel_size=2": ("recipe.train.expert_split", "multiple of tp 4; found 1 and 2"),
            "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4": ("actor = ref", "8 != 4"),
            "recipe.rollout.dp=128": ("rollout layout", r"2 .*dp 128.*= 512 ranks, expected all 256"),
            f"{ROLLOUT}.enable_chunked_prefill=true": ("chunked prefill", "1024, expected >= 203072"),
            f"{ROLLOUT}.free_cache_engine=true": ("graph mode", "free_cache_engine=false"),
            "data.max_prompt_length=200000": ("lengths", "model reaches 163840"),
        },
    ),
    (
        LARGE,
        {
            "recipe.train.layers_per_stage=[31,30]": ("train layout", "must hold 8 counts"),
            f"{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel=false": (
                "engine_kwargs.vllm",
                "False, expected True",
            ),
        },
    ),
    (
        LARGE,
        {
            "data.train_batch_size=500": ("prompts", "500 is not a multiple of 256"),
            "actor_rollout_ref.actor.ppo_mini_batch_size=300": ("mini batch", "500 is not a multiple of 300"),
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7": ("micro batch", "600 is not a multiple of 7"),
            f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=2048": (
                "max_num_seqs",
                "expected <= max_num_batched_tokens 1024",
            ),
            f"{ROLLOUT}.engine_kwargs.vllm.additional_config.torchair_graph_config.graph_batch_sizes=[1,32]": (
                "graph batch sizes",
                "largest graph 32, expected at least the 63",
            ),
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
    # 512 dies: one expert would have to live on two ranks
    (
        "grpo_deepseekv3_256die_random_init",
        {
            "trainer.nnodes=32": ("prompts", "ok"),
            "recipe.rollout.dp=256": ("rollout experts", "256 routed experts over 512 ranks"),
        },
    ),
]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((), {}),
        (
            ("recipe.reshard.bucket_bytes=1000",),
            {"weight sync": "bucket_bytes must be a whole number of at least 14336, one row of model.*, found 1000"},
        ),
        (("recipe.reshard.bucket_bytes=1000", "recipe.patches=[-reshard.*]"), {}),
        (("recipe.reshard.bucket_bytes=1000", "recipe.patches=[-reshard.direct]"), {}),
    ],
)
def test_buckets_of_the_weight_sync_are_checked_before_anything_starts(overrides, found):
    faults = failed(LARGE, *overrides)
    assert faults.keys() == found.keys()
    assert all(re.search(message, faults[check]) for check, message in found.items()), faults


@pytest.mark.parametrize(
    ("overrides", "lost"),
    [
        (("trainer.save_freq=1",), True),
        ((), False),
        (("trainer.save_freq=1", "actor_rollout_ref.actor.megatron.expert_model_parallel_size=1"), False),
    ],
)
def test_checkpoints_that_would_lack_experts_are_refused(overrides, lost):
    found = [check for check in check_config(compose(TINY, overrides)) if check.name == "checkpoints"]
    assert [("rank 0 only" in each.detail, each.ok) for each in found] == [(True, False)] * lost


@pytest.mark.parametrize(
    ("name", "overrides", "state", "said"),
    [
        (TINY, (), "ok", "to torch's pool; weights that the sync writes are not copied$"),
        (LARGE, (), "ok", "keeps the addresses that graphs captured; weights that the sync .* not copied, unless"),
        (
            LARGE,
            ("recipe.patches=[-reshard.*]",),
            "ok",
            "sleep mode.*weights are copied to the host, as row reshard.dir",
        ),
        (
            LARGE,
            ("recipe.weight_sync.enabled=false",),
            "ok",
            "are copied to the host, as recipe.weight_sync.enabled is f",
        ),
        (TINY, ("recipe.weight_sync.enabled=false",), "ok", "weights stay, as recipe.weight_sync.enabled is false"),
        (LARGE, ("recipe.patches=[-memory.sleep_mode]",), "ok", "row memory.sleep_mode is off: vLLM copies all"),
        (
            LARGE,
            (f"{ROLLOUT}.enforce_eager=true",),
            "ok",
            "to torch's pool; weights that the sync writes are not copied$",
        ),
        (TINY, (f"{ROLLOUT}.enforce_eager=false",), "failed", "sleep mode.* on a CPU; expected .*enforce_eager=true"),
        (TINY, ("recipe.patches=[-reshard.*]",), "ok", "weights stay, as row reshard.direct is off"),
        (TINY, ("recipe.patches=[-memory.*]",), "failed", "on a CPU; expected .*without -memory.sleep_mode"),
    ],
)
def test_whose_sleep_the_rollout_has_is_said_and_refused_where_there_is_none(name, overrides, state, said):
    checks = check_config(compose(name, overrides))
    (found,) = (check for check in checks if check.name == "rollout memory")
    assert ("ok" if found.ok else "failed") == state and re.search(said, found.detail), found


@pytest.mark.parametrize(("name", "faults"), FAULTS)
def test_what_cannot_run_is_named_with_expected_and_found(name, faults):
    found = failed(name, *faults)
    for override, (check, message) in faults.items():
        if message != "ok":
            assert re.search(message, found[check]), (override, found)


@pytest.fixture
def model_folder(tmp_path):
    """A folder with the public config.json (fp8 entry, MTP layer, auto_map), and no weights yet."""
    (tmp_path / "config.json").write_text((Path(__file__).parents[1] / "layout" / PUBLIC).read_text())
    return tmp_path


def test_fp8_weights_are_refused_before_anything_starts_and_a_stale_config_is_not(model_folder):
    folder, init = f"actor_rollout_ref.model.path={model_folder}", "actor_rollout_ref.actor.load_weight=false"
    stored = model_folder / "model.safetensors"
    save_file({"a.weight": torch.ones(4).bfloat16()}, stored)
    config = compose(LARGE, [folder])
    assert {c.name: c.ok for c in check_config(config) if c.name.startswith("model")} == {
        "model shape": True,
        "model weights": True,
    }
    assert not hf_config_of(config).keys() & {"quantization_config"}
    save_file({"a.weight": torch.ones(4).to(torch.float8_e4m3fn)}, stored)
    assert "fp8_cast_bf16.py" in failed(LARGE, folder)["model weights"]
    assert failed(LARGE, folder, init) == {}  # random init reads none
    assert failed(LARGE, folder, init, "actor_rollout_ref.rollout.load_format=auto").keys() == {"model weights"}


def test_an_override_that_ends_verls_rank_0_is_refused():
    key = "+actor_rollout_ref.model.override_config.model_config.quantization_config=null"
    assert "expected none" in failed(LARGE, key)["model folder"]


def test_the_truth_check_is_refused_where_it_says_nothing():
    assert compose(LARGE).recipe.logprob_check.every == 10
    found = failed("grpo_deepseekv3_256die_random_init", "recipe.logprob_check={action: stop, every: 10}")
    assert "balanced routing" in found["truth check"]
    assert "multiple of 128" in failed(LARGE, "recipe.logprob_check.sequences=100")["truth check"]


def test_layouts_are_read_from_where_verl_reads_them():
    config = compose(LARGE)
    assert str(train_layout_of(config)) == "tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7"
    rollout = rollout_layout_of(config)
    assert (rollout.tp, rollout.ep, rollout.edp, rollout.dp // rollout.edp) == (2, 128, 2, 64)


def test_require_lists_every_failed_check():
    config = compose(LARGE, ["data.train_batch_size=500", "data.max_prompt_length=200000"])
    with pytest.raises(ConfigError, match=r"prompts: (?s:.*)lengths: "):
        require(check_config(config))
    require(check_config(compose(LARGE)))
