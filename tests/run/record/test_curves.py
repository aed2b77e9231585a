"""Test curves from each framework's files: the same numbers at the same steps, and a sentence for damaged files."""

import json
import math

import pandas
import pytest
from torch.utils.tensorboard import SummaryWriter

from verl_patches.errors import ConfigError
from verl_patches.run.record.curves import FIXED_DATA_LOSS, METRICS, read_curves
from verl_patches.weights.run_folders import take_start

REWARD = {1: 0.25, 2: 0.5, 3: 0.375}
LOSS = {1: -0.125, 2: 0.0, 3: 0.0625}
# lines as the functions named in curves.py make them; between them what else a log has
VERL = """(TaskRunner pid=7) step:0 - val-core/gsm8k/reward/mean@1:0.125
(WorkerDict pid=8) step:9 of the warm-up - reward:7.0
(TaskRunner pid=7) step:{step} - actor/pg_loss:{loss:.4f} - critic/score/mean:{reward:.4f} - actor/lr:1e-06
"""
VERL_NUMPY = "step:{step} - actor/pg_loss:np.float64({loss}) - critic/score/mean:{reward} - training/epoch:0\n"
MINDSPEED = """[2025-06-18 10:00:00] INFO sync start grpo training at iteration: 0/3 ...
[2025-06-18 10:00:01] iteration: {step} / 3 | timing/all : 9.0000 | actor/pg_loss : {loss:.4f} | grpo/score/mean : \
{reward:.4f}
"""
OPENRLHF = (
    "(PPOTrainer pid=9) INFO 06-18 10:00:00 ppo_trainer.py:1] \u2728 Global step {step}: "
    "{{'policy_loss': {loss}, 'reward': tensor({reward}), 'kl': 0.5, 'text': \"it's, {{'kl': 9}}\"}}\n"
)
LOGS = {"verl": VERL, "numpy": VERL_NUMPY, "MindSpeed-RL": MINDSPEED, "OpenRLHF": OPENRLHF}


def curves_in(path, metrics=METRICS):
    return read_curves(path, path.parent, metrics)


def rows(loss="actor/pg_loss", reward="critic/score/mean", step="step"):
    return [{step: number, loss: LOSS[number], reward: REWARD[number]} for number in REWARD]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", LOGS)
def test_a_console_log_of_each_framework(tmp_path, name):
    path = tmp_path / "driver.log"
    path.write_text("noise: 1\n" + "".join(LOGS[name].format(step=n, loss=LOSS[n], reward=REWARD[n]) for n in REWARD))
    found = curves_in(path)
    assert found.values == {"loss": LOSS, "reward": REWARD} and found.kind == "a console log"


def test_tensorboard_with_mindspeeds_prefix(tmp_path):
    writer = SummaryWriter(tmp_path / "tb")
    for step in REWARD:
        writer.add_text("train/loss", "text", step)
        writer.add_scalar("train/grpo/score/mean", REWARD[step], step)
    writer.close()
    (events,) = (tmp_path / "tb").iterdir()
    for given in (tmp_path / "tb", events):
        assert curves_in(given).values == {"reward": REWARD} and curves_in(given).kind == "TensorBoard"
    content = events.read_bytes()
    events.write_bytes(content[:-40])  # the last record is cut off: the complete ones are read
    assert curves_in(events).values["reward"] == {1: 0.25, 2: 0.5}


def test_files_of_several_runs_are_refused(tmp_path):
    (tmp_path / "h.csv").write_text("Step,a - reward,b - reward\n1,0.5,0.25\n")
    with pytest.raises(ConfigError, match="several columns of one name"):
        curves_in(tmp_path / "h.csv")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1").touch()
    with pytest.raises(ConfigError, match="several runs"):
        curves_in(tmp_path)


def test_jsonl_takes_a_rows_step_or_its_number(tmp_path):
    path = write_rows(tmp_path / "m.jsonl", [{"step": 99, **row} for row in rows(step="training/global_step")])
    assert curves_in(path).values == {"loss": LOSS, "reward": REWARD}
    path = write_rows(path, [{"loss": LOSS[n], "rewards": 1.0} for n in LOSS])
    assert curves_in(path).values == {"loss": LOSS}
    path.write_text(path.read_text() + '{"loss": 0.')  # the last line is being written
    assert curves_in(path).values == {"loss": LOSS}


def test_a_run_that_left_a_value_out_has_nan_there(tmp_path):
    """Keep a step without its reward as NaN, because metrics.jsonl has finite numbers alone and the step must count."""
    start = tmp_path / take_start([tmp_path], None, None)
    made = rows()
    del made[1]["critic/score/mean"]
    write_rows(start / "metrics.jsonl", [{"step": 0, "val-core/x": 1.0}, *made])
    found = curves_in(tmp_path).values
    assert found["loss"] == LOSS and found["reward"].keys() == REWARD.keys() and math.isnan(found["reward"][2])
    # control: other files than those of a run may lack values
    assert curves_in(start / "metrics.jsonl").values["reward"].keys() == {1, 3}


def test_a_run_on_fixed_data_has_no_reward(tmp_path):
    write_rows(
        tmp_path / take_start([tmp_path], None, None) / "metrics.jsonl",
        [{**row, FIXED_DATA_LOSS: 2.0} for row in rows()],
    )
    assert curves_in(tmp_path).values["loss"] == dict.fromkeys(LOSS, 2.0) and "reward" not in curves_in(tmp_path).values


@pytest.mark.parametrize("form", ["lines", "csv", "panel"])
def test_exports_of_wandb(tmp_path, form):
    """Read `run.history()` as CSV or JSON lines, and a panel's CSV; a step may have several rows, as in wandb."""
    table = pandas.DataFrame(rows(step="_step"))
    path = tmp_path / ("h.json" if form == "lines" else "h.csv")
    if form == "lines":
        apart = [{"_step": r["_step"], k: v} for r in rows(step="_step") for k, v in r.items() if k != "_step"]
        write_rows(path, [*apart, {"_step": 9, "_runtime": 1.0, "critic/score/mean": None}])
    elif form == "panel":
        table = table.rename(columns={"_step": "Step", **{c: f"run - 1 - {c}" for c in table.columns[1:]}})
        table.to_csv(path, index=False)
    else:
        table.to_csv(path)
    assert curves_in(path).values == {"loss": LOSS, "reward": REWARD}


def test_a_value_is_a_number_also_as_text_or_not_there_and_else_an_error(tmp_path):
    values = ["NaN", float("nan"), "-Infinity", "0.5", None, ""]
    path = write_rows(tmp_path / "m.jsonl", [{"step": n, "loss": value} for n, value in enumerate(values)])
    found = curves_in(path).values["loss"]
    assert found.keys() == {0, 1, 2, 3} and math.isnan(found[0]) and found[2] == -math.inf and found[3] == 0.5
    for row in ({"step": 2, "loss": "text"}, {"step": 2, "loss": [1.0]}, {"step": 1.5, "loss": 1}):
        with pytest.raises(ConfigError, match=r"m.jsonl: loss is .* at step .*; expected numbers at whole steps"):
            curves_in(write_rows(path, [{"step": 1, "loss": 1}, row]))


DAMAGED = {"empty.jsonl": b"", "a.jsonl": b'{"loss": 1}\n{\n{"loss": 1}\n', "text.json": b'"loss"\n'}
DAMAGED |= {"events.out.tfevents.1": b"\xff" * 1000, "absent.jsonl": None}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_sentence_that_names_it(tmp_path, name):
    path = tmp_path / name
    if DAMAGED[name] is not None:
        path.write_bytes(DAMAGED[name])
    with pytest.raises(ConfigError) as raised:
        curves_in(path)
    text = str(raised.value)
    assert str(path) in text and len(text) < 600 and text.isprintable()


def test_a_name_of_ones_own(tmp_path):
    path = write_rows(tmp_path / "m.jsonl", [{"step": 1, "my/loss": 0.5, "loss": 9.0}])
    assert curves_in(path, {"my/loss": ("my/loss",)}).values == {"my/loss": {1: 0.5}}
    with pytest.raises(ConfigError, match="found my/loss, loss"):
        curves_in(path, {"other": ("other",)})
