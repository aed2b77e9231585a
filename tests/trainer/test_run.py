"""The controller's side of a run: its table, the proofs before step 1, the tensor cache."""

from types import SimpleNamespace

import pytest

from verl_patches.patching import engine
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import Switches
from verl_patches.trainer import run
from verl_patches.trainer.run import header, line


def test_a_row_of_the_table_is_as_wide_as_its_header():
    skew = {"put_bytes": 107_000_000_000, "inline_bytes": 4, "start_skew_s": {"max": 81.23456}}
    sync = {"received_bytes": {"max": 25_400_000_000}, "collectives": 65, "peak_extra_bytes": 2_147_483_648}
    step = {"step": 3, "reward": 0.5, "grad_norm": 1.0, "seconds": {}, "logprob_delta": {"mean": 5e-7, "max": 1e-6}}
    step |= {"sync": sync, "memory": {"peak_bytes": 54_990_000_000}, "dispatch": skew}
    assert len(line(step)) == len(header()) == len(line({**step, "sync": None, "memory": None, "dispatch": None}))
    assert " - " in line({**step, "logprob_delta": None}) and " - " in line({**step, "grad_norm": None})


@pytest.fixture
def prove(monkeypatch):
    """prove(states of two workers) -> lines of progress after Run.prove with a catalogue of one row for workers."""
    row = PatchSpec("a.b", "model", "no_such_module_here:f", "wrap", "o:f", "w", "e", processes=frozenset({"worker"}))
    current = engine.Engine([row], Switches("pypi", "cpu", drift="skip"))
    current.apply()
    monkeypatch.setattr(engine, "_CURRENT", current)

    def prove(*states):
        proof = {"where": "here", "error": None, "digest": current.digest(), "intent": current.intent()}
        rows = [[{"id": "a.b", "state": state, "target": row.target, "reason": "r"}] for state in states]
        workers = [{"rank": rank, "status": status, **proof} for rank, status in enumerate(rows)]
        monkeypatch.setattr(run, "workers_proofs", lambda group: workers)
        lines, made = [], object.__new__(run.Run)
        made.trainer = SimpleNamespace(actor_rollout_wg=SimpleNamespace(take_report=lambda: None))
        made.summary, made.not_compared = SimpleNamespace(data={}, write=lambda: None), ""
        made.progress = SimpleNamespace(say=lines.append)
        made.prove()
        return lines

    return prove


def test_a_drifted_row_is_reported_if_all_workers_skip_it_and_refused_if_some_do(prove):
    assert "| drifted (drift=skip, reasons in summary.json): a.b" in prove("drifted", "drifted")
    with pytest.raises(engine.PatchError, match="a.b: active in 0; drifted in 1"):
        prove("active", "drifted")
