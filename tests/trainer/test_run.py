from types import SimpleNamespace

import pytest

from verl_patches.patching import engine
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import Switches
from verl_patches.trainer import run
from verl_patches.trainer.run import header, line


def test_a_row_of_the_table_is_as_wide_as_its_header():
    step = {
        "step": 3,
        "reward": 0.5,
        "grad_norm": 1.0,
        "logprob_delta": {"mean": 5e-7, "max": 1e-6},
        "seconds": {},
        "sync": {"received_bytes": {"max": 25_400_000_000}, "collectives": 65, "peak_extra_bytes": 2_147_483_648},
        "memory": {"peak_bytes": 54_990_000_000},
        "dispatch": {"put_bytes": 107_000_000_000, "inline_bytes": 4, "start_skew_s": {"max": 81.23456}},
    }
    assert len(line(step)) == len(header()) == len(line({**step, "sync": None, "memory": None, "dispatch": None}))
    assert " - " in line({**step, "logprob_delta": None}) and " - " in line({**step, "grad_norm": None})


@pytest.fixture
def prove(monkeypatch, tmp_path):
    """prove(states of two workers) -> what was said, after Run.prove with the catalogue of one row for workers."""
    row = PatchSpec("a.b", "model", "no_such_module_here:f", "wrap", "o:f", "w", "e", processes=frozenset({"worker"}))
    mine = engine.Engine([row], Switches("pypi", "cpu", drift="skip"))
    mine.apply()
    monkeypatch.setattr(engine, "_CURRENT", mine)

    def run_it(*states):
        workers = [
            {
                "rank": rank,
                "where": "here",
                "error": None,
                "digest": mine.digest(),
                "intent": mine.intent(),
                "status": [{"id": "a.b", "state": state, "target": row.target, "reason": "r"}],
            }
            for rank, state in enumerate(states)
        ]
        monkeypatch.setattr(run, "workers_proofs", lambda group: workers)
        said, made = [], run.Run.__new__(run.Run)
        made.trainer = SimpleNamespace(actor_rollout_wg=SimpleNamespace(take_report=lambda: None))
        made.summary, made.not_compared = SimpleNamespace(data={}, write=lambda: None), ""
        made.progress = SimpleNamespace(say=said.append)
        made.prove()
        return said

    return run_it


def test_rows_left_alone_everywhere_are_said_and_those_left_alone_in_some_workers_refused(prove):
    assert "| drifted (drift=skip, reasons in summary.json): a.b" in prove("drifted", "drifted")
    with pytest.raises(engine.PatchError, match="a.b: active in 0; drifted in 1"):
        prove("active", "drifted")


@pytest.mark.parametrize(("enabled", "row", "cached"), [(True, True, True), (True, False, False), (False, True, False)])
def test_tensors_stay_on_workers_where_the_recipe_and_its_row_say_so(monkeypatch, enabled, row, cached):
    """Row update.tensor_cache."""
    monkeypatch.setattr(engine, "is_on", lambda name: row and name == "update.tensor_cache")
    made = run.Run.__new__(run.Run)
    made.cached_group, made.recipe = None, SimpleNamespace(tensor_cache=SimpleNamespace(enabled=enabled))
    config = SimpleNamespace(
        data=SimpleNamespace(max_response_length=4),
        trainer=SimpleNamespace(balance_batch=True),
        algorithm=SimpleNamespace(use_kl_in_reward=False),
    )
    group = object()
    made.trainer = SimpleNamespace(
        config=config, tokenizer=SimpleNamespace(pad_token_id=0), actor_rollout_wg=group, use_reference_policy=False
    )
    made.keep_on_workers()
    assert (made.trainer.actor_rollout_wg is not group) == cached == (made.cached_group is not None)
