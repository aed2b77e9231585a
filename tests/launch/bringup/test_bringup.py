"""Test how a bring-up judges what ranks measured, and how it searches the part that makes a level fail."""

import functools

import pytest

from tests.runs import composed
from verl_patches.catalog import platform_rows
from verl_patches.errors import ConfigError
from verl_patches.launch.bringup import levels
from verl_patches.launch.bringup.bringup import RUNGS, Bringup, StartResult, group_rows, operator_rows, operator_text
from verl_patches.launch.launcher import Outcome

CONFIG = "deepseekv3_16die"
GRAPHS = levels.Suspect("graphs", "rollout", "graphs", ("graphs=false",))
KEYS = [levels.Suspect("keys", "recipe", name, (f"{name}=off",)) for name in "abc"]
ROWS = [levels.Suspect("speed", name.partition(".")[0], name, rows=frozenset({name})) for name in ("r.x", "r.y", "u.z")]


def group(ranks, seconds, wrong=""):
    return {"ranks": ranks, "bytes": 10**9, "seconds": seconds, "wrong": wrong}


def test_a_group_is_judged_by_its_slowest_rank_against_its_peers():
    answers = {"train tp": [group([0, 1], 1.0), group([0, 1], 1.1), group([2, 3], 1.0), group([2, 3], 2.5)]}
    first, second = group_rows(answers, slow=2.0, least_s=0.0)
    assert (first["ranks"], first["seconds"], first["verdict"]) == ([0, 1], 1.1, "ok")
    assert second["verdict"] == "slow: 2.5 s, its peers take 1.1" and second["gb_s"] == pytest.approx(0.4)
    assert {row["verdict"] for row in group_rows(answers, slow=2.0, least_s=3.0)} == {"ok"}
    answers["train tp"][1]["wrong"] = "1 of 4 values"
    assert group_rows(answers, 2.0, 0.0)[0]["verdict"] == "wrong on rank 1: 1 of 4 values"


def test_of_an_operator_the_worst_rank_and_level_is_shown():
    def row(verdict, error):
        return {"operator": "npu_swiglu", "shape": "x [2]", "error": error, "tolerance": 0.02, "verdict": verdict}

    answers = {"operators, level safe": [{"rows": [row("ok", 0.01)]}, {"rows": []}, {"rows": [row("wrong", 0.5)]}]}
    answers |= {"operators, level tuned": [{"rows": [row("ok", 0.001)]}], "train tp": [group([0, 1], 1.0)]}
    (found,) = operator_rows({**answers, "MC2": answers["operators, level tuned"]}, "operators")
    assert operator_text(found) == "npu_swiglu on rank 2: wrong, error 0.5, tolerance 0.02 (x [2])"


@pytest.mark.parametrize("culprit", [GRAPHS, *KEYS, *ROWS], ids=lambda each: each.name)
@pytest.mark.parametrize("known", [True, False])
def test_the_one_part_at_fault_is_found(culprit, known):
    tried = []

    def passes_without(part):
        tried.append(part)
        return culprit in part

    found = levels.find_part([GRAPHS, *KEYS, *ROWS], passes_without, known)
    assert (found.part, found.confirmed, found.starts) == ([culprit], True, len(tried))
    assert len(tried) <= levels.MAX_STARTS
    assert tried[0 if known else 1] == [GRAPHS]  # eager first


def test_a_fault_outside_of_the_parts_is_not_put_on_one_of_them():
    assert not levels.find_part(KEYS, lambda part: False, known=False).confirmed
    both = levels.find_part(KEYS, lambda part: {*KEYS[:2]} <= {*part}, known=True)  # two parts, each fails alone
    assert not both.confirmed
    assert not levels.find_part([], lambda part: True, known=True).confirmed


def test_suspects_of_a_level_are_what_the_level_before_had_not():
    runs = {name: composed(CONFIG, [f"level={name}"]) for name in ("safe", "reference", "tuned")}
    rows = list(platform_rows("npu"))
    first = levels.find_suspects(runs["safe"], None, rows)
    assert {each.kind for each in first} == {"feature"}  # nothing that is correct, observes or decodes in graphs
    graphs, *others = levels.find_suspects(runs["reference"], runs["safe"], rows)
    assert graphs.kind == "graphs" and "recipe.rollout.ascend.graphs=false" in graphs.words
    names = {"recipe.tensor_cache.enabled", "update.tensor_cache", "update.micro_batches_as_planned"}
    assert {each.name for each in others} == names
    tuned = {each.name: each for each in levels.find_suspects(runs["tuned"], runs["reference"], rows)}
    assert tuned["scheduler"].words == (
        "recipe.rollout.ascend.scheduler=ascend",
        "recipe.rollout.ascend.prefix_caching=false",
        "recipe.rollout.ascend.chunked_prefill_for_mla=false",
    )
    assert "rollout.no_collector" in tuned and "graphs" not in {each.kind for each in tuned.values()}


@pytest.mark.parametrize("level", ["reference", "tuned"])
def test_each_part_can_be_turned_off(level):
    before = composed(CONFIG, ["level=safe" if level == "reference" else "level=reference"])
    run = composed(CONFIG, [f"level={level}"])
    for part in levels.find_suspects(run, before, platform_rows("npu")):
        without = composed(CONFIG, [f"level={level}", *levels.words_without(run, [part])])
        assert not part.rows & without.rows
        assert not part.kind == "graphs" or not without.graphs


class Climbed(Bringup):
    """Climb without processes: rungs named in `bad` fail."""

    bad, made = (), ()

    def make(self, name):
        self.made = (*self.made, name)
        return self._rung(name, ["broken"] if name in self.bad else [], "fine")


def climb(folder, first=None, last="measured", bad=(), words=()):
    words = [f"recipe.output_root={folder}", *words]
    bringup = Climbed(
        [CONFIG, *words], [], lambda more: composed(CONFIG, [*words, *more]), None, None, lambda text: None
    )
    bringup.bad = bad
    for name in RUNGS:
        setattr(bringup, f"_{name}", functools.partial(bringup.make, name))
    return bringup.climb(first, last), bringup


def test_a_call_goes_on_at_the_rung_that_failed(tmp_path):
    report, bringup = climb(tmp_path, bad=["groups"])
    assert bringup.made == ("machine", "operators", "groups")
    assert [each.state for each in report.findings] == ["fine", "fine", "problem", "not run", "not run", "not run"]
    assert report.exit_code == 1 and "| groups | problem |" in (bringup.folder / "bringup.md").read_text()
    report, bringup = climb(tmp_path)
    assert bringup.made == ("groups", "levels", "resume", "measured") and report.exit_code == 0
    assert climb(tmp_path, first="levels", last="levels")[1].made == ("levels",)
    report, bringup = climb(tmp_path / "other", first="levels", last="levels")
    assert [each.found for each in report.findings] == ["left out by --from"] * 3 + ["fine"] and report.exit_code == 0
    assert climb(tmp_path, words=["data.train_batch_size=128"])[1].made == tuple(RUNGS)  # another run


def test_a_start_that_is_refused_is_a_failed_rung_with_its_reason(tmp_path):
    def begin(run, often):
        raise ConfigError("no such file")

    words = [f"recipe.output_root={tmp_path}"]
    bringup = Bringup(
        [CONFIG], [], lambda more: composed(CONFIG, [*words, *more]), begin, platform_rows, lambda text: None
    )
    rung = bringup._levels()
    assert rung.finding.state == "problem" and "no such file" in rung.finding.found
    assert "at_fault" not in rung.figures["levels"]  # no part is searched
    bringup.begin = lambda run, often: Outcome(1, "it broke", tmp_path, 1.0)
    (tmp_path / "summary.json").write_text('{"steps": []}')
    rung = bringup._levels()
    assert rung.finding.found == "level safe fails: it broke" and rung.finding.todo.endswith("driver.log")
    assert not rung.figures["levels"]["at_fault"]["confirmed"]


def test_an_exchange_that_a_device_refuses_is_a_fault_of_its_rung(tmp_path):
    words = [f"recipe.output_root={tmp_path}"]
    bringup = Bringup([CONFIG], [], lambda more: composed(CONFIG, [*words, *more]), None, None, lambda text: None)
    row = {
        "operator": "dispatch",
        "shape": "x [2]",
        "error": None,
        "tolerance": 0.02,
        "seconds": None,
        "verdict": "failed: x",
    }
    probes = {"rollout experts": [group([0], 1.0)], "MC2": [{"rows": [row]}]}
    bringup.probes = StartResult(Outcome(0, "ok", tmp_path, 1.0), {"probes": probes})
    assert bringup._groups().finding.found == "dispatch on rank 0: failed: x (x [2])"
    row |= {"seconds": 0.002, "error": 0.0, "verdict": "ok"}
    assert "MC2 takes 2 ms, all-to-all one way 1e+03" in bringup._groups().finding.found
    bringup.unanswered = ["MC2"]
    assert "ended while they measured MC2" in bringup._groups().finding.found
