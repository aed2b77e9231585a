"""The committed table of keys is what the scan finds in verl's source, which tests the scan too."""

from pathlib import Path

import pytest
import verl_keys

from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir
from verl_patches.upstream.pins import read_by_verl

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


# ways to a key that change nothing in the installed verl: its table tests the others
SOURCE = """
from omegaconf import OmegaConf
class TaskRunner:
    def run(self, config):
        part, other = config.data, config.unread_section
        helper(other, own=part)
        Child(config.actor)
def helper(first, *, own):
    getattr(own, "seed", 0)
    OmegaConf.select(own, "a.b")
class Base:
    def __init__(self, config):
        self.settings = config
class Child(Base):
    def __init__(self, config):
        super().__init__(config=config)
    def later(self):
        self.settings.lr
"""


def test_the_scan_follows_tuples_keyword_only_arguments_reads_by_name_and_super(tmp_path):
    files = {"trainer/main_ppo.py": SOURCE, f"trainer/config/{VERL_CONFIG}.yaml": "data: {}\nactor: {}\n"}
    for name, text in files.items():
        (tmp_path / "verl" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "verl" / name).write_text(text)
    assert verl_keys.Scan(tmp_path / "verl").keys() == ["actor.lr", "data.a.b", "data.seed"]
