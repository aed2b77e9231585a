"""What ranks send each other when requests move; with requests themselves: test_rebalance_engine.py."""

import msgspec
import pytest

from verl_patches.rollout.rebalance_wire import Result, pack, unpack


def results():
    """With log-probs of two columns, without any, and one that has ended by a stop token."""
    with_log_probs = Result("12", 1, 2, [5, 6], [[5, 9], [6, 5]], [[-0.1, -2.5], [-1e-7, -30.0]], [1, 3], cached=16)
    return [with_log_probs, Result("0_3", 0, 0, [7]), Result("4", 3, 1, [2], [[2]], [[-0.5]], [1], 0, 2, 0)]


def test_results_arrive_as_they_were_sent():
    found, requests = unpack(pack(results(), []))
    assert found == results() and requests == []


def test_a_segment_of_another_version_is_refused():
    with pytest.raises(msgspec.DecodeError):
        unpack(pack(results(), []) + b"\0")
    with pytest.raises(msgspec.DecodeError):
        unpack(msgspec.msgpack.encode([[{"id": "12"}], []]))


def test_the_planner_needs_no_torch(run_python):
    modules = "verl_patches.rollout.rebalance, verl_patches.rollout.rebalance_wire"
    run_python(f"import sys, {modules}\nassert 'torch' not in sys.modules").check()
