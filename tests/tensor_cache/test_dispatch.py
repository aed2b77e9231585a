"""Calls to all workers: what is serialised, what arrives, when they start."""

import functools
import threading

import numpy as np
import pytest
import torch
from verl.protocol import DataProto
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch, register

from verl_patches.trainer import dispatch, worker_starts
from verl_patches.trainer.worker_starts import noted, start_skew

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
    """What dispatch_job.py says."""
    return run_ranks(
        "tests.tensor_cache.dispatch_job:on_and_off",
        patches="line=pypi,platform=cpu",
        backend=None,
        env={"RAY_TMPDIR": ray_folder},
    )[0]


@pytest.mark.slow
def test_every_large_argument_is_serialised_once(found):
    """Row dispatch.put_once, with and without it."""
    assert {case: tuple(found[of][case]["large"] for of in ("on", "off")) for case in LARGE} == LARGE
    for case, (large, _) in LARGE.items():
        told = found["on"][case]["told"]
        assert told["puts"] == large
        assert told["put_bytes"] == pytest.approx(found["on"][case]["bytes"], rel=0.01) or not large
    assert found["on"]["small"]["told"]["inline_bytes"] == 4 * (8 + 72)


@pytest.mark.slow
def test_workers_get_what_they_got_and_answer_as_they_did(found):
    for case in LARGE:
        assert found["on"][case]["answers"] == found["off"][case]["answers"]
    each = found["on"]["one a worker"]["answers"]
    assert len({answer[0][0] for answer in each}) == 4 and [answer[1][0] for answer in each] == list(map(repr, "0123"))
    replica = [answer[0][0] for answer in found["on"]["shared by a replica"]["answers"]]
    assert replica[0] == replica[1] != replica[2] == replica[3]
    assert found["on"]["error"] == found["off"]["error"] == ["RayTaskError(ValueError)", True]


@pytest.mark.slow
def test_tensors_of_a_batch_are_the_workers_own_and_arrays_are_rays_on_both_ways(found):
    for of in ("on", "off"):
        assert found[of]["shared by a replica"]["answers"][0][0][1] == [True, False]
        assert found[of]["small"]["answers"][0][1][1] is False


@pytest.mark.slow
def test_a_worker_notes_what_it_was_asked_and_not_what_that_calls(found):
    """Row dispatch.note_starts."""
    asked = ["say"] * 10 + ["compute"] * 2 + ["generate"] * 2 + ["fail"] * 2 + ["take_starts"]  # two a process
    assert found["starts"] == [asked, asked] and set(found["skew"]) == set(asked)


def test_skew_is_between_the_same_calls_of_all_workers():
    first = [("f", 10.0), ("f", 20.0), ("g", 30.0), ("only here", 31.0)]
    second = [("f", 10.5), ("f", 20.25), ("g", 29.0), ("g", 33.0)]
    assert start_skew([first, second]) == {"f": 0.5}
    assert start_skew([first, second[:3]]) == {"f": 0.5, "g": 1.0}
    assert start_skew([]) == {} and start_skew([first, []]) == {}


def test_a_step_is_the_sum_of_its_calls_and_its_worst_skew():
    dispatch.take_calls()
    dispatch._calls.extend([dispatch.Call("f", 2, 100, 1), dispatch.Call("g", 1, 50, 2)])
    told = dispatch.dispatch_of_step([[("f", 1.0), ("g", 2.0)], [("f", 1.25), ("g", 2.5)]])
    assert told == {
        "calls": 2,
        "puts": 3,
        "put_bytes": 150,
        "inline_bytes": 3,
        "start_skew_s": {"max": 0.5, "by_call": {"f": 0.25, "g": 0.5}},
    }
    assert dispatch.take_calls() == []


def batch():
    return DataProto.from_dict({"x": torch.zeros(4, 8)}, {"n": np.array(["ab", [1, 2]] * 2, dtype=object)}, {"a": None})


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (None, 8),
        (True, 8),
        ("four", 4),
        (np.float32(1), 4),
        (np.zeros(3), 24),
        (torch.zeros(3), 12),
        ({"a": [1, (2.0, b"xy")]}, 19),
        (batch(), 128 + 1 + 2 * (2 + 16) + 1 + 8),
    ],
)
def test_sizes_are_of_the_parts(value, size):
    assert dispatch._bytes_up_to([value], 10**6) == size
    assert dispatch._bytes_up_to([value] * 3, 10**6) == 3 * size


def test_what_is_not_known_is_not_small_and_counting_ends_early():
    assert dispatch._bytes_up_to([object()], dispatch.INLINE_BYTES) > dispatch.INLINE_BYTES

    class Watched(list):
        seen = 0

        def __iter__(self):
            for part in super().__iter__():
                Watched.seen += 1
                yield part

    assert dispatch._bytes_up_to([Watched(["x" * 60] * 10)], 100) > 100 and Watched.seen == 2


def test_coroutines_and_calls_of_vllms_executor_are_left_alone():
    worker_starts.take_starts()
    made = noted(register)
    assert noted(register).__name__ == "register"

    async def sleep(self):
        return None

    def method(self):
        return "done"

    for decorated in (
        made(dispatch_mode=Dispatch.ONE_TO_ALL)(sleep),
        made(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)(method),
    ):
        assert decorated.__code__ is not made(dispatch_mode=Dispatch.ONE_TO_ALL)(method).__code__
    plain = made(dispatch_mode=Dispatch.ONE_TO_ALL)(method)
    assert plain(None) == "done" and [name for name, _ in worker_starts.take_starts()] == ["method"]
    assert made(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)(method)(None) == "done"
    assert worker_starts.take_starts() == []
    assert getattr(plain, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL


def test_a_method_goes_by_the_name_that_it_is_called_by():
    def f(self):  # as verl's GPUMemoryLogger makes it
        return None

    class Worker:
        one = noted(register)(dispatch_mode=Dispatch.ONE_TO_ALL)(f)
        two = noted(register)(dispatch_mode=Dispatch.ONE_TO_ALL)(f)

    Worker.two = functools.wraps(Worker.two)(lambda self, below=Worker.two: below(self))  # a row
    worker_starts.take_starts()
    Worker().two(), Worker().one()
    assert [name for name, _ in worker_starts.take_starts()] == ["two", "one"]


def test_an_error_ends_the_call_and_threads_do_not_hide_each_other():
    worker_starts.take_starts()

    @noted(register)(dispatch_mode=Dispatch.ONE_TO_ALL)
    def outer(self, inner):
        inner()
        raise KeyError

    @noted(register)(dispatch_mode=Dispatch.ONE_TO_ALL)
    def other():
        return None

    def in_thread():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    for inner in (other, in_thread):
        with pytest.raises(KeyError):
            outer(None, inner)
    assert [name for name, _ in worker_starts.take_starts()] == ["outer", "outer", "other"]
