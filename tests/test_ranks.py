"""The launcher reports which rank failed, died or hung; the next call starts new ranks if it must."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, Ranks

pytestmark = pytest.mark.slow


def fails(rank: int, how: str) -> int:
    """The size of the group, after a barrier that `rank` does not reach."""
    if dist.get_rank() == rank:
        if how == "raises":
            raise ZeroDivisionError("of this rank")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    dist.barrier()
    return dist.get_world_size()


@pytest.mark.parametrize(("how", "words"), [
    ("raises", r"(?s)rank 1:.*ZeroDivisionError: of this rank.*rank 0 did not answer:.*in barrier"),
    ("dies", r"(?s)rank 1 died.*rank 1 ended with exit code -9"),
    ("hangs", r"(?s)rank 1 did not answer:.*in fails"),
])  # fmt: skip
def test_a_failure_names_the_rank_and_the_next_call_works(how, words):
    with Ranks(2) as ranks:
        assert ranks.run(fails, 2, how) == [2, 2]
        ranks.timeout_s = 1.0 if how == "hangs" else ranks.timeout_s
        with pytest.raises(RankError, match=words):
            ranks.run(fails, 1, how)
        ranks.timeout_s = 600.0
        assert ranks.run(fails, 2, how) == [2, 2]


def scaled(values: torch.Tensor) -> torch.Tensor:
    """Times two on rank 0, three on rank 1."""
    return values * (2 + dist.get_rank())


def test_tensors_and_errors_of_all_ranks_arrive():
    with Ranks(2) as ranks:
        results = ranks.run("tests.test_ranks:scaled", torch.arange(3))
        assert [result.tolist() for result in results] == [[0, 2, 4], [0, 3, 6]]
        with pytest.raises(RankError, match=r"(?s)rank 0:\n.*TypeError.*rank 1:\n.*TypeError"):
            ranks.run("tests.test_ranks:scaled")
