"""The committed table of keys is what the scan finds in verl's source, and the scan finds what it says it does."""

import sys
from pathlib import Path

import pytest

from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir
from verl_patches.upstream.pins import read_by_verl

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import verl_keys

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize("line", ["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def test_the_committed_table_is_that_of_the_tree(line, pytestconfig):
    verl = Path(pytestconfig.getoption("--upstream")).absolute() / "verl" if line == "a3" else None
    found = verl_keys.Scan(verl_config_dir(verl).parents[1]).keys()
    assert set(found) == read_by_verl(line)  # else: python scripts/verl_keys.py --upstream DIR


@pytest.mark.parametrize("line", ["pypi", "a3"])
def test_keys_of_the_megatron_path_are_in_the_table_and_others_are_not(line):
    keys = read_by_verl(line)
    assert {"data.seed", f"{ROLLOUT}.seed", "trainer.val_only", "reward_model.reward_kwargs.*"} <= keys
    assert {f"{ROLLOUT}.engine_kwargs.vllm.*", "actor_rollout_ref.actor.megatron.seed", "ray_init.num_cpus"} <= keys
    assert "actor_rollout_ref.model.override_config.model_config.*" in keys
    absent = "algorithm.filter_groups reward_model.overlong_buffer actor_rollout_ref.actor.fsdp_config".split()
    absent += ["actor_rollout_ref.model.use_liger", "actor_rollout_ref.actor.grad_clip", f"{ROLLOUT}.max_num_seqs"]
    assert not [key for key in keys if key.startswith(tuple(absent))]  # of no module, or of FSDP's


SOURCE = {
    "trainer/main_ppo.py": """
from verl.workers.actor import Actor
from verl.workers.fsdp_workers import Other
def run_ppo(config):
    TaskRunner.remote().run.remote(config)
class TaskRunner:
    def run(self, config):
        part, name = config.data, config["trainer"].get("name", 1)
        helper(part.files.split(), own=part)
        Actor(config.actor, 1)
        Other(config.other)
        print(config.unread_section)
def helper(first, *, own):
    getattr(own, "seed", 0)
    for key, value in own.get("free").items():
        pass
""",
    "workers/actor.py": """
from omegaconf import OmegaConf
from .base import Base
class Actor(Base):
    def __init__(self, config, number):
        super().__init__(config=config)
        self.extra = config.sub
    def later(self):
        options = OmegaConf.to_container(self.extra)
        use(**options["kwargs"])
        OmegaConf.select(self.settings, "a.b")
        self.settings.stored = 1
        self.computed(*[self.settings.get(name) for name in ("x", "y")])
""",
    "workers/base.py": """
class Base:
    def __init__(self, config):
        self.settings = config
    def early(self):
        return self.extra.of_subclass or self.settings.lr
class Unused:
    def __init__(self, config):
        config.never
""",
    "workers/fsdp_workers.py": "class Other:\n    def __init__(self, config):\n        config.fsdp_only\n",
    "workers/megatron_workers.py": "",
    f"trainer/config/{VERL_CONFIG}.yaml": "data: {files: text}\nactor: {lr: 1}\n",
}


def test_the_scan_follows_the_configuration(tmp_path):
    for name, text in SOURCE.items():
        file = tmp_path / "verl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert verl_keys.Scan(tmp_path / "verl").keys() == [
        "actor.a.b",
        "actor.lr",
        "actor.sub.kwargs.*",
        "actor.sub.of_subclass",
        "data.files",
        "data.free.*",
        "data.seed",
        "trainer.name",
    ]
