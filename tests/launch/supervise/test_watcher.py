"""Test the watch on several nodes: raylets of this machine, of which one is killed."""

import json
import re

import pytest

pytestmark = pytest.mark.slow
DRILLS = "from tests.launch.supervise.ray_job import main; main()"


@pytest.mark.nightly
def test_a_stopped_rank_and_a_lost_node_of_a_real_ray_are_named_and_nothing_is_left(tmp_path, run_python, ray_folder):
    """Run rank 1 on the third node, where an agent sees it; a second node is left out by its address."""
    env = {"RAY_TMPDIR": ray_folder}
    done = run_python(DRILLS, str(tmp_path), patches="line=pypi,platform=cpu", env=env).check()
    found = json.loads(done.out[done.out.index("FOUND") + len("FOUND") :].splitlines()[0])
    assert found["raised"] == "rank 1 (pid 5 on there) in step 7: ValueError: expected 2, found 3"
    assert found["raised elsewhere"] == ""  # negative control: not by an actor of the group
    assert found["free"] == [3.0, 2.0]
    assert found["stall"].startswith("rank 1 (pid ") and "is stopped (state T" in found["stall"], found["stall"]
    (raised,) = found["device"]["culprits"]
    assert (raised["name"], raised["node"]) == ("rank 2", found["second"])
    (culprit,) = found["record"]["culprits"]
    assert (culprit["name"], culprit["node"]) == ("rank 1", found["third"])
    assert found["record"]["sentence"] == found["stall"]
    assert set(found["stacks"]) == {"rank_1.txt", "rank_0.txt"}
    assert all("in update_actor" in text for text in found["stacks"].values())
    for text in (found["lost"], found["explained"]):
        assert re.match(r"node [\d.]+ with rank 1 is lost: Ray's head has lost it", text), text
    assert len(found["folders"]) == 3 and found["folders_left"] == [found["third"]]
