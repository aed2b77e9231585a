import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verl_patches.config.compose import compose
from verl_patches.errors import ConfigError
from verl_patches.launch import ray_cluster
from verl_patches.launch.ray_cluster import check_nodes, list_nodes

NPU16 = {"resources": {"NPU": 16.0, "CPU": 8.0}}


@pytest.fixture(scope="module")
def config():
    return compose("grpo_deepseekv3_256die_true_weight")


def test_enough_nodes_pass_and_missing_ones_are_counted(config):
    nodes = [{"address": f"10.0.0.{n}", **NPU16} for n in range(16)]
    check_nodes(config, nodes)
    with pytest.raises(ConfigError, match=r"16 node\(s\) with 16 NPU each.*Ray has 15 such node\(s\) of 15"):
        check_nodes(config, nodes[1:])
    nodes[3] = {"address": "10.0.0.3", "resources": {"NPU": 8.0}}
    with pytest.raises(ConfigError, match=r"15 such node\(s\) of 16 .*10\.0\.0\.3: 8"):
        check_nodes(config, nodes)


def test_an_address_without_ray_is_refused(monkeypatch):
    monkeypatch.setattr(ray_cluster, "_LIST_NODES", "raise SystemExit('no route')")
    with pytest.raises(ConfigError, match=r"no Ray answers there \(no route\).*--dry-run prints the ray commands"):
        list_nodes("127.0.0.1:1")


@pytest.mark.slow
def test_a_real_ray_tells_its_nodes():
    """A Ray of this test's own, which says it has 16 NPUs."""
    temp = tempfile.mkdtemp(prefix="vp-test-")
    code = (
        "import ray, time; "
        f"c = ray.init(resources={{'NPU': 16}}, num_cpus=1, _temp_dir={temp!r},include_dashboard=False); "
        "print(c.address_info['gcs_address'], flush=True); time.sleep(120)"
    )
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    head = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    try:
        nodes = list_nodes(head.stdout.readline().strip())
        assert [node["resources"]["NPU"] for node in nodes] == [16.0]
    finally:
        head.terminate()
        head.wait(20)
        shutil.rmtree(temp, ignore_errors=True)
    assert not Path(temp).exists()
