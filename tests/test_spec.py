"""Test RunSpec: workers read back the controller's facts, nothing changes them, other values are as if composed."""

import ast
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError

from tests.conftest import ROOT
from tests.runs import composed, trainer_config, worker_section
from verl_patches.errors import ConfigError
from verl_patches.layout.flops import balanced_layers
from verl_patches.plan.memory_plan import MAX_NUM_SEQS_KEY, recompute_keys
from verl_patches.plan.search import GRAPHS_KEY, as_overrides, rollout_keys, train_keys
from verl_patches.run.resolve import CONFIGS_DIR, changed_run
from verl_patches.spec import RunSpec, run_from_config

TINY, BIG, TRUE_WEIGHT = "deepseekv3_tiny_cpu", "deepseekv3_256die_random_init", "deepseekv3_256die_true_weight"
RUNS = sorted(path.stem for path in CONFIGS_DIR.glob("deepseekv3_*.yaml") if "algo: " in path.read_text())
REF_MICRO_BATCH = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
# fields that workers do not get; verl hands them their section of its configuration
CONTROLLER_FIELDS = {"verl", "no_start", "given_keys", "trees"}
ROOMS = "trainer worker step memory plan rewards reshard".split()
# functions that take a configuration before there is a RunSpec: of an invalid layout, or of one rollout instance
FUNCTIONS_BEFORE_RUN = {
    "plan/serving.py:instance_config",
    "plan/plan.py:_search_command",
    "rewards/parts.py:reward_parts",  # RunSpec is made from its result
}


@pytest.mark.parametrize(
    ("name", "algo"), [*((name, "grpo") for name in RUNS), *((TINY, algo) for algo in ("ppo", "sft", "rm", "gspo"))]
)
def test_a_worker_reads_the_facts_of_the_controller_from_its_section(name, algo):
    run = composed(name, [f"algo={algo}", "recipe.patches=[-reshard.*]"])
    here, worker = run_from_config(trainer_config(run)), run_from_config(worker_section(run))
    for read in (here, worker):
        unlike = {field.name for field in fields(RunSpec) if getattr(read, field.name) != getattr(run, field.name)}
        assert unlike <= CONTROLLER_FIELDS
    assert here.verl.trainer == run.verl.trainer and not worker.verl
    assert worker.text() == run.text() and "reshard.direct" not in worker.rows


def test_a_section_without_the_facts_is_refused():
    section = OmegaConf.create(OmegaConf.to_container(composed(TINY).verl.actor_rollout_ref))
    with pytest.raises(ConfigError, match="has no key 'run'; expected the facts of the run"):
        run_from_config(section)


def test_a_run_cannot_be_changed():
    run = composed(TINY)
    with pytest.raises(FrozenInstanceError):
        run.rows = frozenset()
    with pytest.raises(ReadonlyConfigError):
        run.verl.trainer.nnodes = 2
    for facts in (run.hf_config, run.engine):
        with pytest.raises(TypeError):
            facts["n_group"] = 1
    other = run.with_verl({"trainer.save_freq": 7})
    assert other.verl.trainer.save_freq == 7 != run.verl.trainer.save_freq


LAYERS = {"recipe.train.layers_per_stage": balanced_layers(composed(BIG).model, 16)}
UPDATES = {
    "layouts": {
        "trainer.nnodes": 8,
        **train_keys(1, 16, 8, LAYERS["recipe.train.layers_per_stage"]),
        **rollout_keys(4, 128),
        MAX_NUM_SEQS_KEY: 128,
        "recipe.train.swap_optimizer": False,
    },
    "batches": {"data.train_batch_size": 1024, "actor_rollout_ref.actor.ppo_mini_batch_size": 256, REF_MICRO_BATCH: 4},
    "micro batches": {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2},
    "graphs": {MAX_NUM_SEQS_KEY: 16, GRAPHS_KEY: [8, 16]},
    "recomputation": recompute_keys((3, 2, 1, 1, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("name", [BIG, TRUE_WEIGHT])
@pytest.mark.parametrize("kind", UPDATES)
def test_other_values_are_as_if_composed_with_them(name, kind):
    # a number, not auto, so that it does not change
    given = ["algo=ppo", "level=tuned", *as_overrides(recompute_keys(8))]
    run, updates = composed(name, given), UPDATES[kind]
    before = OmegaConf.to_yaml(run.verl)
    expected = composed(name, [*given, *as_overrides(updates)])
    found = changed_run(run, updates)
    assert OmegaConf.to_container(found.verl) == OmegaConf.to_container(expected.verl)
    assert replace(found, given_keys=expected.given_keys) == expected
    assert OmegaConf.to_yaml(run.verl) == before and replace(run, given_keys=expected.given_keys) != expected


def config_functions(tree: ast.AST) -> set[str]:
    """Return the names of functions with a parameter whose annotation names DictConfig."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        function.name
        for function in functions
        for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if arg.annotation is not None and "DictConfig" in ast.unparse(arg.annotation)
    }


def test_no_function_takes_a_configuration_to_learn_what_a_run_knows():
    files = {path for room in ROOMS for path in (ROOT / "verl_patches" / room).rglob("*.py")}
    place = {path: path.relative_to(ROOT / "verl_patches").as_posix() for path in files}
    found = {f"{place[path]}:{name}" for path in files for name in config_functions(ast.parse(path.read_text()))}
    assert found == FUNCTIONS_BEFORE_RUN
    control = ast.parse("def f(a: int, *, config: 'DictConfig | None' = None): ...")
    assert config_functions(control) == {"f"}
