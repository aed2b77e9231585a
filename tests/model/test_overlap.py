"""recipe.train.grad_overlap in Megatron core_r0.8.0's own schedule, without MindSpeed."""

import math
import os

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.upstream]


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, run_ranks, a3_sources):
    """What each data-parallel rank found."""
    env = {"PYTHONPATH": os.pathsep.join(map(str, a3_sources("verl", "Megatron-LM")))}
    patches = "line=a3,platform=cpu,-update.engine_start"
    return run_ranks("tests.model.overlap_job:found", size=request.param, patches=patches, env=env)


def mini_batches(events):
    """The events of each mini batch."""
    found = []
    for event in events:
        found = [*found, []] if event == "mini batch" else [*found[:-1], [*found[-1], event]]
    return found


def backward_after_sync(events):
    """Whether backward goes on after the first reduction of a mini batch has started."""
    return any(event.startswith("grad ") for event in events[events.index("sync") :])


def test_overlapped_updates_are_those_of_the_plain_run(ranks):
    for rank in ranks:
        plain, overlapped = rank["plain"], rank["overlapped"]
        assert all(a.equal(b) for a, b in zip(plain["weights"], overlapped["weights"], strict=True))
        for a, b in zip(plain["norms"], overlapped["norms"], strict=True):
            assert a == pytest.approx(b, rel=1e-6, nan_ok=True)
        assert plain["skipped"] == overlapped["skipped"] == 2  # both mini batches of the second update
        assert [math.isnan(norms[0]) for norms in overlapped["norms"]] == [False, True, False]
        pairs = zip(overlapped["weights"], ranks[0]["overlapped"]["weights"], strict=True)
        assert all(weight.equal(other) for weight, other in pairs)


def test_reductions_start_in_backward(ranks):
    for rank in ranks:
        first, second = mini_batches(rank["overlapped"]["events"])
        assert first.count("sync") == second.count("sync") == 3 and all(map(backward_after_sync, (first, second)))
        for events in mini_batches(rank["plain"]["events"]):  # negative control
            assert events.count("sync") == 1 and not backward_after_sync(events)


def test_without_no_sync_the_second_micro_batch_is_refused_by_megatron(ranks):
    assert {rank["without no_sync"] for rank in ranks} == {"Cannot set grad twice"}
