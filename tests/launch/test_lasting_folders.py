"""Test that a run on NPUs keeps nothing in its container's own file system, by mount tables of the test."""

import psutil
import pytest
from typer.testing import CliRunner

from tests.runs import composed
from verl_patches.__main__ import app
from verl_patches.errors import ConfigError
from verl_patches.launch.jobs.job import load_job
from verl_patches.run.compose import CONFIGS_DIR
from verl_patches.run.run_folder import require_lasting_folders

ROOT = CONFIGS_DIR.parent
OWN = "overlay / overlay rw 0 0\nproc /proc proc rw 0 0\ntmpfs /dev tmpfs rw 0 0\n"
HOST = OWN.replace("overlay / overlay", "/dev/sda1 / ext4")
OUTPUTS = str(ROOT / "outputs")  # where the 256-die configs write by default


def mounted(*folders):
    return "".join(f"nas:/x {folder} nfs4 rw 0 0\n" for folder in folders)


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """Return refusal(mount table, *overrides), the 256-die run's error, "" if it starts."""
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))

    def ask(table, *overrides, name="deepseekv3_256die_true_weight"):
        (tmp_path / "self" / "mounts").write_text(table)
        try:
            require_lasting_folders(composed(name, list(overrides)))
        except ConfigError as error:
            return str(error)
        return ""

    return ask


def test_with_the_volumes_of_the_example_job_both_256_die_runs_start(refusal):
    job = load_job(CONFIGS_DIR / "cluster_256die.yaml")
    inside = [folder.replace(job.checkout, str(ROOT)) for folder in job.volumes.values()]
    for name in ("deepseekv3_256die_true_weight", "deepseekv3_256die_random_init"):
        assert refusal(OWN + mounted(*inside), name=name) == ""
        assert refusal(OWN, name=name) and refusal(HOST, name=name) == ""  # on a host nothing is deleted
    assert refusal(OWN, name="deepseekv3_tiny_cpu") == ""
    assert refusal(OWN + mounted(OUTPUTS), "data.train_files=/opt/of_image/a.parquet") == ""  # what is only read


def test_a_place_that_is_not_mounted_is_named_with_its_key_and_the_mounts(refusal):
    said = refusal(OWN + mounted("/data", "/more"))
    assert all(f"{key}: {OUTPUTS}" in said for key in ("recipe.output_root", "trainer.default_local_dir"))
    assert "/data, /more" in said


@pytest.mark.parametrize(
    ("key", "inside", "mount", "path"), [("trainer.default_local_dir", "/home/me/ckpt", "/data/ckpt", "/home/me/ckpt")]
)
def test_an_override_counts_as_the_run_resolves_it(refusal, monkeypatch, key, inside, mount, path):
    monkeypatch.chdir(ROOT)
    table = OWN + mounted("/data", OUTPUTS)
    assert refusal(table) == refusal(table, f"{key}={mount}") == ""
    assert f"{key}: {ROOT / path}" in refusal(table, f"{key}={inside}")


def test_train_is_refused_before_anything_is_started(refusal):
    said = refusal(OWN)  # the command sees the same table
    done = CliRunner().invoke(app, ["train", "--config-name", "deepseekv3_256die_true_weight"])
    assert isinstance(done.exception, ConfigError) and str(done.exception) == said
