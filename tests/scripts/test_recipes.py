"""Test the record of the presets' runs and its table: reading, keeping and showing outcomes.

test_readme_tables tests the page.
"""

import json
from dataclasses import replace

import pytest
import recipe_runs
from chains import CHAINS, Chain, shortfalls
from recipe_runs import main, presets, presets_table, smoke_arguments

NAMES = ["grpo", "rloo"]


def ran(algo, where, **more):
    command = " ".join(["bash scripts/smoke.sh", *smoke_arguments(algo, where, "upstream")])
    head = {"algo": algo, "where": where, "command": command, "date": "2026-11-26"}
    return head | {"exit": 0, "step": 3, "figures": {"reward": 0.125, "grad norm": 2.5}, "reason": ""} | more


def test_the_record_has_each_preset_in_each_place_and_the_learning_runs_with_their_stated_amounts():
    runs = {(run["algo"], run["where"]): run for run in recipe_runs.read_record()["runs"]}
    places = {*recipe_runs.PLACES} - {"learning"}
    learning = [(name, "learning") for name in recipe_runs.LEARNING]
    missing = sorted({(name, place) for name in presets() for place in places}.union(learning) - runs.keys())
    assert not missing
    assert {run["exit"] for run in runs.values()} <= {0, 2}  # a refusal has its reason in the table
    assert [runs[key]["exit"] for key in learning] == [0] * len(learning)
    assert [recipe_runs.shortfall(name, runs[name, where]["learnt"]) for name, where in learning] == [""] * len(
        learning
    )


def test_a_learning_run_that_does_not_reach_its_stated_amount_has_failed(tmp_path, monkeypatch):
    assert recipe_runs.shortfall("grpo", ["reward", 0.25, 0.75]) == ""
    assert recipe_runs.shortfall("sft", ["objective's loss", 6.0, 4.0]) == ""
    assert "improved by -2, expected 1.3" in recipe_runs.shortfall("sft", ["objective's loss", 4.0, 6.0])
    (folder := tmp_path / "outputs" / "recipe_grpo_learning" / "latest").mkdir(parents=True)
    lines = [{"step": n, "critic/score/mean": 0.5 + n / 100} for n in range(1, 13)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "training.png").write_bytes(b"a picture")
    monkeypatch.setattr(recipe_runs, "ROOT", tmp_path)
    monkeypatch.setattr(recipe_runs, "PICTURES", tmp_path / "images")
    monkeypatch.setattr(recipe_runs, "PROGRAM", ("-c", ""))
    made = recipe_runs.run_preset("grpo", "learning", None)
    assert made["exit"] == 1 and made["reason"] == "reward improved by 0.07, expected 0.35 or more"
    assert (tmp_path / "images" / "learning_grpo.png").read_bytes() == b"a picture"
    monkeypatch.undo()
    text = presets_table({"runs": [made]}, NAMES)
    assert f"| reward | 0.53 | 0.6 | 0.35 | failed: {made['reason']} ({made['date']}) |" in text


FAKE = """
import json, sys
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\\n")
sys.exit(1 if "algo=rloo" in sys.argv else 2)
"""


def test_the_runs_that_are_asked_for_are_made_and_recorded_and_a_failure_is_the_exit_code(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(recipe_runs, "PROGRAM", (str(tmp_path / "fake.py"), str(tmp_path / "calls")))
    monkeypatch.setattr(recipe_runs, "RECORD", tmp_path / "recipes.json")
    assert main(["--only", "grpo", "--where", "pypi"]) == 0  # refused
    assert main(["--only", "rloo", "--upstream", "/up", "--where", "emulated"]) == 1
    first, second = (json.loads(line) for line in (tmp_path / "calls").read_text().splitlines())
    assert first[:5] == ["smoke", "--run", "recipe_grpo_pypi", "--steps", "3"]
    assert second[3:-1] == ["--line", "a3", "--emulate-npu", "--upstream", "/up", "--steps", "3", "algo=rloo"]
    assert [run["algo"] for run in recipe_runs.read_record()["runs"]] == ["grpo", "rloo"]
    assert "/up" not in (tmp_path / "recipes.json").read_text()
    with pytest.raises(SystemExit):
        main(["--where", "a3"])
    assert "--where a3 and emulated need --upstream" in capsys.readouterr().err


def test_the_record_has_each_chain_with_the_figures_that_are_stated_of_it():
    made = {run["chain"]: run for run in recipe_runs.read_record()["chains"]}
    assert [*made] == [*CHAINS] and {run["exit"] for run in made.values()} == {0}
    assert {name: shortfalls(name, run["figures"]) for name, run in made.items()} == dict.fromkeys(CHAINS, "")


FAKE_CHAIN = Chain(lambda folder: iter([["-c", "pass"]]), lambda folder: [("accuracy", "a", 0.25, "b", 0.5)], (0.2,))


@pytest.mark.parametrize(
    ("least", "code", "said"), [(0.2, 0, ""), (0.3, 1, "accuracy changed by 0.25, expected +0.3 or more")]
)
def test_a_chain_that_does_not_reach_its_stated_amount_has_failed(tmp_path, monkeypatch, least, code, said):
    monkeypatch.setattr(recipe_runs, "ROOT", tmp_path)
    monkeypatch.setattr(recipe_runs, "RECORD", tmp_path / "recipes.json")
    monkeypatch.setitem(CHAINS, "rm_ppo", replace(FAKE_CHAIN, least=(least,)))
    assert main(["--where", "chains", "--only", "rm_ppo"]) == code
    (made,) = recipe_runs.read_record()["chains"]
    assert made["exit"] == code and said in made["reason"] and bool(said) == bool(made["reason"])
    row = recipe_runs.chains_table(recipe_runs.read_record())
    assert f"failed: {made['reason']}" in row if code else "| accuracy | 0.25 (a) | 0.5 (b) | +0.2 |" in row
