"""Test calls to all workers: serialised bytes, and the values that arrive."""

import pytest

from verl_patches.trainer import dispatch

# objects above 1 MB that the controller serialises: with the row, without it
LARGE = {
    "shared by a replica": (2, 4),
    "one a worker": (4, 4),
    "one for all": (1, 8),
    "small": (0, 0),
    "nothing": (0, 0),
    "verl's Megatron dispatch": (2, 2),
    "verl's dispatch to all": (4, 4),
}


@pytest.fixture(scope="module")
def found(ray_folder, run_ranks):
    """Return the findings of dispatch_job.py."""
    options = {"patches": "line=pypi,platform=cpu", "backend": None, "env": {"RAY_TMPDIR": ray_folder}}
    return run_ranks("tests.step.batches.dispatch_job:on_and_off", **options)[0]


@pytest.mark.slow
def test_every_large_argument_is_serialised_once(found):
    """Compare with and without row dispatch.put_once."""
    for case, (large, without) in LARGE.items():
        on, off = (found[way][case] for way in ("on", "off"))
        assert (on["large"], off["large"]) == (large, without) and on["row"]["puts"] >= large, case
        assert on["row"]["put_bytes"] == pytest.approx(on["bytes"], rel=0.01) or not large


@pytest.mark.slow
def test_values_and_errors_are_those_of_verl_without_the_row(found):
    for case in LARGE:
        assert found["on"][case]["answers"] == found["off"][case]["answers"]
    each = found["on"]["one a worker"]["answers"]
    assert len({answer[0][0] for answer in each}) == 4 and [answer[1][0] for answer in each] == list(map(repr, "0123"))
    replica = found["on"]["shared by a replica"]["answers"]
    first, same, second, also = (answer[0][0] for answer in replica)
    assert first == same != second == also and replica[0][0][1] == [True, False]  # a worker may write to its tensors
    assert found["on"]["error"] == found["off"]["error"] == ["RayTaskError(ValueError)", True]


@pytest.mark.slow
def test_what_rays_stores_hold_is_counted(found):
    kept, held = found["kept_bytes"]
    assert kept <= held < 2 * kept and dispatch.object_store_usage() == {}  # no Ray in this process


def test_a_step_is_the_sum_of_its_calls():
    dispatch.take_calls()
    dispatch.sent_counts.value.update(calls=2, puts=3, put_bytes=150)
    assert dispatch.take_calls() == {"calls": 2, "puts": 3, "put_bytes": 150}
    assert not any(dispatch.take_calls().values())
