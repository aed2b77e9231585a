"""Test that proofs of workers are compared with the controller's."""

import pytest

from verl_patches.patching import handshake
from verl_patches.patching.engine import PatchError


def worker(rank, intent=None, digest="", error=None, **states):
    status = [{"id": f"a.{name}", "state": state} for name, state in states.items()]
    proof = {"intent": intent, "digest": digest, "error": error, "status": status}
    return {"rank": rank, "where": f"pid {100 + rank} on node", **proof}


def test_equal_digests_pass_and_another_one_names_worker_and_row():
    mine = {"a.b": "on:1:2", "a.c": "off"}
    handshake.require_same_patches(mine, "d" * 64, [worker(0, mine, "d" * 64)])
    other = {**mine, "a.c": "on:3:4"}
    with pytest.raises(PatchError, match=r"worker 1 \(pid 101 on node\).*different rows: a\.c"):
        handshake.require_same_patches(mine, "d" * 64, [worker(0, mine, "d" * 64), worker(1, other, "e" * 64)])


def test_workers_without_proof_are_named():
    handshake.require_proofs([worker(0), worker(1)])
    with pytest.raises(PatchError, match=r"^worker 1 \(pid 101 on node\): not active$"):
        handshake.require_proofs([worker(0), worker(1, error="not active")])
    with pytest.raises(PatchError, match=r"worker 1 (.|\n)*2 more workers failed: ranks 2, 3$"):
        handshake.require_proofs([worker(0), *(worker(rank, error="x") for rank in (1, 2, 3))])


def test_a_group_of_verls_own_workers_is_refused():
    with pytest.raises(PatchError, match="remove -update.recipe_worker from recipe.patches"):
        handshake.gather_proofs(object())


@pytest.mark.slow
def test_a_worker_that_never_ran_the_prelude_is_refused_by_rank(ray_folder, run_ranks):
    """Use real Ray, verl's own worker group and its colocated class; worker 1 ran the prelude and proves it."""
    digest, (without, with_prelude), refusal = run_ranks(
        "tests.trainer.bare_worker:proofs",
        patches="line=pypi,platform=cpu",
        backend=None,
        env={"RAY_TMPDIR": ray_folder},
    )[0]
    assert without.get("digest") is None and with_prelude["digest"] == digest and with_prelude["rank"] == 1
    assert refusal.startswith("worker 0 (") and "pid=" in without["where"]
    assert "did not run the prelude" in refusal and "install-prelude" in refusal
