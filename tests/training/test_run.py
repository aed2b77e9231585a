import pytest

from verl_patches.patching.engine import PatchError
from verl_patches.training.run import header, line, refuse_unequal


def worker(rank, intent, digest):
    return {"rank": rank, "pid": 100 + rank, "intent": intent, "digest": digest}


def test_equal_digests_pass_and_another_one_names_worker_and_row():
    mine = {"a.b": "on:1:2", "a.c": "off"}
    refuse_unequal(mine, "d" * 64, [worker(0, mine, "d" * 64)])
    other = {**mine, "a.c": "on:3:4"}
    with pytest.raises(PatchError, match=r"worker 1 \(pid 101\).*different rows: a\.c"):
        refuse_unequal(mine, "d" * 64, [worker(0, mine, "d" * 64), worker(1, other, "e" * 64)])


def test_a_row_of_the_table_is_as_wide_as_its_header():
    step = {"step": 3, "reward": 0.5, "grad_norm": 1.0, "logprob_delta": {"mean": 5e-7, "max": 1e-6}, "seconds": {}}
    assert len(line(step)) == len(header())
    assert " - " in line({**step, "logprob_delta": None}) and " - " in line({**step, "grad_norm": None})
