from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.config.checks import check_config, check_files
from verl_patches.config.compose import compose
from verl_patches.config.files import PATHS
from verl_patches.errors import ConfigError
from verl_patches.launch import smoke
from verl_patches.launch.smoke import LAYOUTS, TRAIN_LAYOUTS, SmokeOptions, overrides_of

COMBINATIONS = [(layout, tp, dp) for layout in TRAIN_LAYOUTS for tp in (1, 2) for dp in (1, 2)]
FITTING = [c for c in COMBINATIONS if TRAIN_LAYOUTS[c[0]].workers % (c[1] * c[2]) == 0]
QUICK = [("ep2", 2, 1), ("tp2", 1, 2), ("pp2", 1, 1), ("tp2ep2", 2, 2)]
SLOW = [pytest.param(*c, marks=pytest.mark.slow) for c in FITTING if c not in QUICK]


@pytest.mark.parametrize(("train_layout", "tp", "dp"), [*QUICK, *SLOW])
def test_every_fitting_combination_passes_all_checks(train_layout, tp, dp):
    options = SmokeOptions(train_layout=train_layout, rollout_tp=tp, rollout_dp=dp)
    config = compose(smoke.CONFIG_NAME, overrides_of(options))
    assert [c for c in check_config(config) if not c.ok] == []
    engine = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert engine.enable_expert_parallel == (tp * dp > 1) and engine.data_parallel_size == dp


@pytest.mark.parametrize("train_layout", LAYOUTS["a3"])
def test_on_line_a3_experts_stay_whole_and_layers_are_listed(train_layout):
    config = compose(smoke.CONFIG_NAME, overrides_of(SmokeOptions(train_layout=train_layout, line="a3")))
    assert [c for c in check_config(config) if not c.ok] == [] and config.recipe.line == "a3"
    megatron, train = config.actor_rollout_ref.actor.megatron, config.recipe.train
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    assert megatron.expert_tensor_parallel_size == 1 and ep % tp == 0
    assert (train.expert_split == "tp_extend_ep") == (tp > 1)
    assert train.layers_per_stage is None or sum(train.layers_per_stage) == 4


def test_options_reach_the_config(tmp_path):
    odd = tmp_path / "a b=c,d'e[1]{2}"  # Hydra's grammar gives each of these a meaning
    odd.mkdir()
    options = SmokeOptions(steps=7, dtype="bf16", replay_rollout=odd, run="named", seed=3)
    config = compose(smoke.CONFIG_NAME, overrides_of(options))
    assert (config.trainer.total_training_steps, config.recipe.dtype, config.recipe.run) == (7, "bf16", "named")
    assert config.recipe.rollout.replay == str(odd)
    seeds = (config.data.seed, config.actor_rollout_ref.rollout.seed, config.actor_rollout_ref.actor.megatron.seed)
    assert seeds == (3, 3, 3)


def test_no_two_kinds_of_smoke_share_a_run_name_and_each_says_what_it_proves():
    kinds = [{}, {"learn": True}, {"line": "a3"}, {"line": "a3", "learn": True}, {"line": "a3", "emulate_npu": True}]
    names = [SmokeOptions(**kind).run_name for kind in kinds]
    assert names[0] == "smoke" and len({*names}) == len(kinds)
    assert {SmokeOptions(**kind, run="r").run_name for kind in kinds} == {"r"}
    proved = set()
    for kind in kinds:
        recipe = compose(smoke.CONFIG_NAME, overrides_of(SmokeOptions(**kind))).recipe
        proved.add(f"{recipe.line} {recipe.platform}")
    assert proved == smoke.PROVED.keys()


def test_learning_takes_the_steps_of_its_config_without_an_option():
    assert not any("total_training_steps" in override for override in overrides_of(SmokeOptions()))  # the config's 3
    learn = compose(smoke.LEARN_CONFIG_NAME, overrides_of(SmokeOptions(learn=True)))
    assert learn.trainer.total_training_steps == 40
    assert learn.recipe.rewards == [{"name": "learnable"}]
    assert [c for c in check_config(learn) if not c.ok] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_layout": "pp2", "rollout_tp": 2, "rollout_dp": 2}, "needs 4 workers.*--train-layout tp2ep2, ep2pp2"),
        ({"emulate_npu": True}, "expected --line a3"),
        ({"learn": True, "replay_rollout": Path("/")}, "remove one"),
    ],
)
def test_wrong_combinations_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        overrides_of(SmokeOptions(**options))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("--train-layout", "ep4"), ("--line", "a4"), ("--dtype", "fp16"), ("--replay-rollout", "/no/such/run")],
        *[("--rollout-tp", "3"), ("--rollout-dp", "0"), ("--steps", "0"), ("--seed", "-1"), ("--seed", str(2**32))],
    ],
)
@pytest.mark.parametrize("json", [[], ["--json"]])
def test_a_value_that_an_option_does_not_take_is_refused_by_its_name(option, value, json):
    done = CliRunner().invoke(app, ["smoke", "--learn", "--replay-rollout", "/", option, value, *json])
    assert done.exit_code == 2 and done.stdout == "" and f"Invalid value for '{option}'" in done.stderr


def test_a_failed_preparation_says_what_and_shows_the_end_of_its_output(monkeypatch, tmp_path):
    monkeypatch.setattr(smoke, "_MAKE_MODEL", "raise SystemExit('no room for the model')")
    with pytest.raises(ConfigError, match=r"the tiny model could not be made \(exit 1\):\n  no room for the model"):
        smoke.inputs_of(SmokeOptions(), tmp_path).make(lambda text: None)


def test_an_objective_on_fixed_data_has_rows_with_responses_alone(tmp_path):
    def tasks(*overrides):
        made = smoke.inputs_of(SmokeOptions(), tmp_path, overrides).tasks
        return {folder.name.partition("-")[0]: task for folder, task in made.items()}

    assert tasks().keys() == tasks("algo=grpo").keys() == {"maths", "learnable"}
    assert tasks("algo=dpo") == {"learnable": [*smoke.LEARN_TASK, "--answers", "paired"]}
    assert tasks("algo=dpo", "algo=kto")["learnable"][-1] == "unpaired"  # the last one counts
    folders = [next(iter(smoke.inputs_of(SmokeOptions(), tmp_path, [f"algo={name}"]).tasks)) for name in ("sft", "kto")]
    assert folders[0] != folders[1]


@pytest.mark.slow
@pytest.mark.parametrize("learn", [False, True])
def test_model_and_data_are_made_once(tmp_path, learn):
    said: list[str] = []
    first = smoke.inputs_of(SmokeOptions(learn=learn), tmp_path)
    first.make(said.append)
    assert len(said) == (2 if learn else 3)  # the model, and each task's data
    options = SmokeOptions(learn=learn)
    config = compose(options.config_name, [*overrides_of(options), *first.overrides])
    assert Path(config.actor_rollout_ref.model.path, "config.json").is_file()
    assert [check for check in check_files(config, PATHS) if not check.ok] == []
    config.recipe.model_shape = "model/deepseekv3_671b.json"  # another one than that of the model made
    assert "model shape" in {check.name for check in check_files(config, PATHS) if not check.ok}
    files = [*config.data.train_files, *config.data.val_files]
    assert len(files) == 2 * (len(said) - 1)
    first.make(said.append)
    assert len(said) == len(files) // 2 + 1
    assert smoke.inputs_of(SmokeOptions(learn=learn, seed=1), tmp_path).overrides != first.overrides
