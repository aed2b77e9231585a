"""offload_job.py on both lines and on several ranks, each part once per session."""

import functools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

JOB = Path(__file__).resolve().parent / "offload_job.py"


@pytest.fixture(scope="session")
def offload_job(run_warm, pytestconfig, tmp_path_factory):
    """offload_job(*parts, line="pypi", ranks=1): what each rank found, {part: found}.

    Line a3 needs checkouts under --upstream and skips, with the reason, where they are not there; without MindSpeed,
    so nothing here starts it.
    """
    @functools.cache
    def run(*parts, line="pypi", ranks=1):
        env = {"TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(ranks),
               "STORE": str(tmp_path_factory.mktemp("ranks") / "store")}
        if line == "a3":
            env["PYTHONPATH"] = _sources(pytestconfig.getoption("--upstream"))
        patches = f"line={line},platform=cpu" + (",-update.engine_start" if line == "a3" else "")

        def one(rank):
            code = f"import sys; sys.path.insert(0, {str(JOB.parent)!r})\n{JOB.read_text()}"
            done = run_warm(code, *parts, patches=patches, env={**env, "RANK": str(rank)})
            return json.loads(done.check().out.splitlines()[-1])

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(one, range(ranks)))

    return run


def _sources(folder):
    sources = [folder / name for name in ("verl", "Megatron-LM")] if folder else []
    if not sources or not all((source / source.name.partition("-")[0].lower()).is_dir() for source in sources):
        pytest.skip(f"--upstream {folder} holds no checkouts of verl and Megatron-LM: fetch-upstream makes them")
    return os.pathsep.join(map(str, sources))
