"""Test a run's future files against the free space of its file systems, before a start and in a dry run."""

import json
from collections import namedtuple
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.runs import composed
from tests.weights.cases import as_value_model, make_start
from verl_patches import shared_files
from verl_patches.__main__ import app
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.model.tiny import tiny_config
from verl_patches.run import files

TINY, LARGE = "deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight"
STEPS, SAVE, KEEP = "trainer.total_training_steps", "trainer.save_freq", "trainer.max_actor_ckpt_to_keep"
Usage = namedtuple("Usage", "free")


def checkpoint_bytes(run, parameter_bytes):
    return parameter_bytes * sum(parameter.count for parameter in build_inventory(run.model).parameters)


def check_disk(run, starts=True):
    (check,) = files.disk_checks(run, starts)
    return check


@pytest.mark.parametrize(("held", "fits"), [(4, True), (3, True), (2, False)])
def test_the_models_folder_has_the_layers_that_a_run_takes_of_it(tmp_path, held, fits):
    """Set recipe.num_hidden_layers=3; without it (the control) only a folder of all 4 is the planned model."""
    path = f"actor_rollout_ref.model.path={tmp_path}"

    def shape_fits(*overrides):
        checks = files.folder_checks(composed(TINY, [path, *overrides]))
        return next(check.ok for check in checks if check.name == "model shape")

    (tmp_path / "config.json").write_text(json.dumps(tiny_config({"num_hidden_layers": held})))
    assert shape_fits("recipe.num_hidden_layers=3") is fits and shape_fits() is (held == 4)
    config = tiny_config({"num_hidden_layers": held, "torch_dtype": "float32"})  # as an export of an fp32 run has it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_fits("recipe.num_hidden_layers=3") is fits


def test_a_reward_models_folder_has_a_head_the_actors_sizes_and_a_tokenizer(tiny_model, tmp_path):
    as_value_model(tiny_model, model := tmp_path / "model", 0)

    def fault_detail(path, *overrides):
        run = composed(TINY, [f"recipe.rewards=[{{name: reward_model, path: {path}}}]", *overrides])
        (check,) = files.reward_folder_checks(files.with_required_files(run))
        return check.detail if not check.ok else ""

    assert fault_detail(model) == "" and fault_detail(tmp_path).startswith("recipe.rewards[0].path: ")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/critic").symlink_to(model)
    assert fault_detail(tmp_path / "whole") == ""  # a checkpoint as it stands
    assert "no score.weight" in fault_detail(tiny_model)
    assert "does not exist" in fault_detail(tmp_path / "absent")
    shape = {"num_hidden_layers": 3}
    (tmp_path / "three.json").write_text(json.dumps(tiny_config(shape)))
    assert "num_hidden_layers" in fault_detail(model, f"recipe.model_shape={tmp_path / 'three.json'}")
    model_config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(model_config | {"routed_scaling_factor": 7.0}))
    a3 = ["recipe.line=a3", "recipe.platform=npu_emulated"]
    assert fault_detail(model) == ""
    assert "routed_scaling_factor 7.0 !=" in fault_detail(model, *a3)  # built of the actor's arguments
    (model / "config.json").write_text(json.dumps(model_config))
    actors = f"actor_rollout_ref.model.path={tiny_model}"
    assert fault_detail(model, actors) == ""
    words = json.loads((model / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    words["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (model / "tokenizer.json").write_text(json.dumps(words))
    assert "the vocabulary in tokenizer.json differs" in fault_detail(model, actors)
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in fault_detail(model)
    run = composed(TINY, [f"recipe.rewards=[{{name: reward_model, path: {tmp_path / 'absent'}}}]"])
    (check,) = files.reward_folder_checks(run)
    assert check.ok and check.note  # control: a plan for another machine


def test_files_that_a_dataset_of_the_users_reads_need_not_be_parquet(tmp_path):
    """Check also with algo=sft, whose own class is a control, as verl's is without one."""
    rows, mine = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    rows.write_text('{"question": "1 + 1"}\n' * 8)
    mine.write_text("class Own: ...\n")
    given = [f"data.train_files={rows}", f"data.val_files=[{rows}]", f"{STEPS}=null"]
    for algorithm in ([], ["algo=sft"]):
        own = [f"data.custom_cls.path={mine}", "data.custom_cls.name=Own"]
        for dataset, failed in ((own, []), ([], [False, False])):
            run = composed(TINY, [*algorithm, *given, *dataset])
            checks = list(files.data_checks(run))
            assert [check.ok for check in checks if not check.ok] == failed
            assert [check.note for check in checks] == [not failed] * 2
        missing = composed(TINY, [*algorithm, *own, "data.train_files=/nowhere"])
        assert any(not check.ok for check in files.data_checks(missing))


def test_the_steps_of_epochs_are_not_known_where_a_class_of_the_users_makes_samples_of_rows(tmp_path):
    """Check this because it may change the number of samples: a run must not count as ended, or its disk as full."""
    row = {"prompt": [{"role": "user", "content": "1 + 1"}], "data_source": "a", "reward_model": {"ground_truth": "2"}}
    pq.write_table(pa.Table.from_pylist([row] * 64), tmp_path / "rows.parquet")
    given = [f"data.train_files={tmp_path / 'rows.parquet'}", f"{STEPS}=null", "trainer.total_epochs=2"]
    own = ["data.custom_cls.path=/mine.py", "data.custom_cls.name=Own"]
    # control: verl's own dataset class
    assert files.total_steps(composed(TINY, [*given, "data.train_batch_size=4"])) == 32
    assert files.total_steps(composed(TINY, [*given, *own])) is None


@pytest.mark.parametrize(("overrides", "count"), [
    ([f"{STEPS}=5", f"{SAVE}=2", f"{KEEP}=null"], 3),  # after steps 2, 4 and the last
    ([f"{STEPS}=5", f"{SAVE}=1", f"{KEEP}=2"], 3),  # 2 that are kept, and one that is written
    ([f"{STEPS}=5", f"{SAVE}=5", f"{KEEP}=3"], 1),
    ([f"{STEPS}=5", f"{SAVE}=-1"], 0),
    ([f"{STEPS}=null", f"{SAVE}=1"], 2),  # the tiny config's data is absent, so the steps are unknown
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_checkpoints_take_those_that_are_kept_and_the_one_that_is_written(overrides, count, dtype):
    run = composed(TINY, [*overrides, f"recipe.dtype={dtype}"])
    found = {need.name: need.size_bytes for need in files.disk_needs(run)}
    size = checkpoint_bytes(run, {"bf16": 14, "fp32": 12}[dtype])
    assert found.get("checkpoints", 0) == count * size and found["run"] >= 64 << 20


def test_a_run_that_goes_on_writes_what_is_left_of_it_and_removes_its_own(tmp_path):
    """Go on after step 4 of 9 with two checkpoints; a run that begins anew does not own them."""
    make_start(tmp_path / "r", (2, 4))
    counts = []
    for mode, keep in (("auto", 2), ("auto", "null"), ("disable", 2), ("disable", "null")):
        given = [f"recipe.output_root={tmp_path}", "recipe.run=r", f"{STEPS}=9", f"{SAVE}=2", f"{KEEP}={keep}"]
        run = composed(TINY, [*given, f"trainer.resume_mode={mode}"])
        found = {need.name: need.size_bytes for need in files.disk_needs(run)}
        counts.append(found["checkpoints"] / checkpoint_bytes(run, 12))
    assert counts == [1, 3, 3, 5]  # keeping all, auto writes steps 6, 8 and 9; disable also 2 and 4


@pytest.fixture
def make_run(monkeypatch, tmp_path):
    """Return make_run(free, ...) -> a run whose folder and checkpoints are on file systems with so many free bytes."""

    def make(free, checkpoints=None, *overrides):
        monkeypatch.setattr(shared_files.shutil, "disk_usage", lambda place: Usage(free[Path(place).stat().st_dev]))
        given = [f"{STEPS}=4", f"{SAVE}=1", f"{KEEP}=1", f"recipe.output_root={tmp_path / 'new'}"]
        given += [f"trainer.default_local_dir={checkpoints}"] if checkpoints else []
        return composed(TINY, [*given, *overrides])

    return make


def test_a_start_that_would_fill_the_disk_is_refused_and_a_dry_run_says_so(make_run, tmp_path):
    """Put both on one file system; one byte less than their sum is too little, though each alone would fit."""
    here = tmp_path.stat().st_dev
    need = sum(need.size_bytes for need in files.disk_needs(make_run({here: 0})))
    run = make_run({here: need})
    fits = check_disk(run)
    assert fits.ok and not fits.note and "2 checkpoints" in fits.detail
    run = make_run({here: need - 1})
    full = check_disk(run)
    assert not full.ok and str(tmp_path / "new") in full.detail and "2 checkpoints" in full.detail
    assert KEEP in full.detail and "recipe.output_root" in full.detail
    planned = check_disk(run, starts=False)
    assert planned.ok and planned.note and planned.detail == full.detail


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system")
def test_file_systems_are_looked_at_one_by_one(make_run, tmp_path):
    here, other = tmp_path.stat().st_dev, Path("/dev/shm").stat().st_dev
    run, checkpoints = (need.size_bytes for need in files.disk_needs(make_run({here: 0, other: 0})))
    there = "/dev/shm/not/there"
    assert check_disk(make_run({here: run, other: checkpoints}, there)).ok
    assert not check_disk(make_run({here: run + checkpoints, other: checkpoints - 1}, there)).ok
    full = check_disk(make_run({here: run - 1, other: checkpoints}, there))
    assert not full.ok and "/dev/shm/not/there" not in full.detail


@pytest.mark.parametrize("command", ["smoke", "train"])
def test_the_commands_refuse_before_anything_is_written(make_run, tmp_path, command, monkeypatch):
    make_run({tmp_path.stat().st_dev: 1000})
    words = ["smoke"] if command == "smoke" else ["train", "--config-name", TINY]
    monkeypatch.setattr("verl_patches.cli.run._file_checks", lambda _: [])  # this machine has no data files
    done = CliRunner().invoke(app, [*words, f"recipe.output_root={tmp_path / 'new'}"])
    assert isinstance(done.exception, ConfigError) and "disk: expected " in str(done.exception)
    assert not (tmp_path / "new").exists()
    words = ["train", "--config-name", TINY, "--dry-run", "--all", f"recipe.output_root={tmp_path}"]
    dry = CliRunner().invoke(app, words)
    assert dry.exit_code == 0 and "found 0.0 MB" in dry.output
