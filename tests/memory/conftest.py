"""offload_job.py on both lines and on several ranks, each part once per session."""

import functools
import os

import pytest


@pytest.fixture(scope="session")
def offload_job(run_ranks, a3_sources):
    """offload_job(*parts, line="pypi", switches=(), ranks=1): what each rank found, {part: found}."""

    @functools.cache
    def run(*parts, line="pypi", switches=(), ranks=1):
        env = {"PYTHONPATH": os.pathsep.join(map(str, a3_sources("verl", "Megatron-LM")))} if line == "a3" else None
        off = ("-update.engine_start", "-update.grad_overlap") if line == "a3" else ()  # no MindSpeed on this path
        patches = ",".join((f"line={line},platform=cpu", *off, *switches))
        return run_ranks("tests.memory.offload_job:found", parts, size=ranks, patches=patches, env=env)

    return run
