import pytest

from tests import runs
from verl_patches.errors import ConfigError
from verl_patches.launch import smoke
from verl_patches.launch.smoke import SmokeOptions, smoke_overrides
from verl_patches.rules import RULES
from verl_patches.run.files import with_required_files
from verl_patches.run.resolve import LayoutError, changed_run

# {line: {layout: workers, tp, ep, etp, pp, what ep means, layers of the stages}}; line a3 keeps experts whole
LAYOUTS = {
    "pypi": {
        "ep2": (2, 1, 2, 1, 1, "etp", None),
        "tp2": (2, 2, 1, 2, 1, "etp", None),
        "pp2": (2, 1, 1, 1, 2, "etp", None),
        "tp2ep2": (4, 2, 2, 1, 1, "etp", None),
        "ep2pp2": (4, 1, 2, 1, 2, "etp", None),
    },
    "a3": {
        "ep2": (2, 1, 2, 1, 1, "etp", None),
        "tp2": (2, 2, 2, 1, 1, "tp_extend_ep", None),
        "pp2": (2, 1, 1, 1, 2, "etp", [3, 1]),
        "tp2ep2": (4, 2, 4, 1, 1, "tp_extend_ep", None),
        "ep2pp2": (4, 1, 2, 1, 2, "etp", None),
    },
}
# {rollout: tp, dp, whether whole experts are split over tp x dp}
ROLLOUTS = {"tp1": (1, 1, False), "tp2": (2, 1, True), "dp2": (1, 2, True), "tp2dp2": (2, 2, True)}


def composed(*overrides, **options):
    """Return the facts of a smoke without the places of model and data."""
    options = SmokeOptions(overrides, **options)
    return runs.composed(options.config_name, smoke_overrides(options))


def faults(run):
    return [check.detail for check in RULES.checks(run) if not check.ok]


@pytest.mark.parametrize(("line", "layout"), [(line, layout) for line in LAYOUTS for layout in LAYOUTS[line]])
def test_a_layout_has_the_sizes_of_its_line_and_passes_all_checks(line, layout):
    run = composed(f"layout={layout}", line=line)
    sizes = [getattr(run.train, name) for name in ("world_size", "tp", "ep", "etp", "pp")]
    assert (*sizes, run.recipe.train.expert_split, run.recipe.train.layers_per_stage) == LAYOUTS[line][layout]
    assert faults(run) == []


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_a_rollout_has_its_sizes_and_goes_with_layouts_that_have_its_ranks(rollout):
    for layout, workers in (("ep2", 2), ("tp2ep2", 4)):
        tp, dp, _ = ROLLOUTS[rollout]
        if tp * dp > workers:
            with pytest.raises(LayoutError, match="4 ranks, expected all 2;.*layout=NAME"):
                composed(f"layout={layout}", f"rollout={rollout}")
            continue
        run = composed(f"layout={layout}", f"rollout={rollout}")
        engine = run.engine["data_parallel_size"], run.engine["enable_expert_parallel"]
        assert (run.rollout.tp, *engine) == ROLLOUTS[rollout] and faults(run) == []


def test_an_override_wins_over_the_layout_and_the_last_layout_counts():
    train = composed("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "layout=tp2", "layout=ep2").train
    assert (train.tp, train.ep) == (2, 2)


@pytest.mark.parametrize(
    ("word", "line", "names"),
    [("layout=ep4", "pypi", LAYOUTS["pypi"]), ("layout=ep4", "a3", LAYOUTS["a3"]), ("rollout=tp3", "pypi", ROLLOUTS)],
)
def test_an_unknown_layout_is_refused_with_the_list(word, line, names):
    with pytest.raises(ConfigError, match=f"^{word}: expected one of {', '.join(sorted(names))}$"):
        composed(word, line=line)


def test_options_reach_the_config(tmp_path):
    odd = tmp_path / "a b=c,d'e[1]{2}"  # Hydra's grammar gives each of these a meaning
    odd.mkdir()
    run = composed(steps=7, dtype="bf16", replay_rollout=odd, run="named", seed=3)
    assert (run.verl.trainer.total_training_steps, run.recipe.dtype, run.recipe.run) == (7, "bf16", "named")
    assert run.recipe.rollout.replay == str(odd)
    section = run.verl.actor_rollout_ref
    assert (run.verl.data.seed, section.rollout.seed, section.actor.megatron.seed) == (3, 3, 3)


@pytest.mark.parametrize(
    ("overrides", "options", "name"),
    [
        ("layout=tp2ep2", {"line": "a3"}, "smoke-tp2ep2-a3"),
        ("rollout=dp2 algo=dpo algo=kto", {"learn": True}, "learn-kto-rollout_dp2"),
        ("algo=ppo recipe.run=last", {"run": "named"}, "last"),
    ],
)
def test_the_name_of_a_run_says_what_is_not_the_default_unless_it_is_given(overrides, options, name):
    assert composed(*overrides.split(), **options).recipe.run == name


def test_an_emulated_npu_of_another_line_is_refused():
    with pytest.raises(ConfigError, match="expected --line a3"):
        composed(emulate_npu=True)


def test_a_failed_preparation_says_what_and_shows_the_end_of_its_output(monkeypatch, tmp_path):
    monkeypatch.setattr(smoke, "_MAKE_MODEL", "raise SystemExit('no room for the model')")
    with pytest.raises(ConfigError, match=r"the tiny model failed with exit code 1:\n  no room for the model"):
        smoke.smoke_inputs(SmokeOptions(), tmp_path).make(lambda text: None)


def test_an_objective_on_fixed_data_has_rows_with_responses_alone(tmp_path):
    def tasks(*overrides):
        made = smoke.smoke_inputs(SmokeOptions(overrides), tmp_path).tasks
        return {folder.name.partition("-")[0]: task for folder, task in made.items()}

    assert tasks().keys() == tasks("algo=grpo").keys() == {"maths", "learnable"}
    assert tasks("algo=dpo") == {"learnable": [*smoke.LEARN_TASK, "--answers", "paired"]}
    assert tasks("algo=dpo", "algo=kto")["learnable"][-1] == "unpaired"  # the last one counts
    folders = [
        next(iter(smoke.smoke_inputs(SmokeOptions([f"algo={name}"]), tmp_path).tasks)) for name in ("sft", "kto")
    ]
    assert folders[0] != folders[1]


@pytest.mark.slow
@pytest.mark.parametrize("learn", [False, True])
def test_model_and_data_are_made_once(tmp_path, learn):
    said: list[str] = []
    first = smoke.smoke_inputs(SmokeOptions(learn=learn), tmp_path)
    first.make(said.append)
    assert len(said) == (2 if learn else 3)  # the model, and each task's data
    options = SmokeOptions(learn=learn)
    run = with_required_files(runs.composed(options.config_name, smoke_overrides(options, first.overrides)))
    assert (run.model_folder / "config.json").is_file() and faults(run) == []
    # another shape than that of the model that was made
    other = changed_run(run, {"recipe.model_shape": "model/deepseekv3_671b.json"})
    assert "expected the sizes of recipe.model_shape" in faults(other)[0]
    files = [*run.verl.data.train_files, *run.verl.data.val_files]
    assert len(files) == 2 * (len(said) - 1)
    first.make(said.append)
    assert len(said) == len(files) // 2 + 1
    assert smoke.smoke_inputs(SmokeOptions(learn=learn, seed=1), tmp_path).overrides != first.overrides
