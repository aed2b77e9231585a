"""Fixtures for tests of the stand-ins on platform cpu."""

import pytest


@pytest.fixture(scope="session")
def a3_sources(pytestconfig):
    """Folder with the sources of line a3 side by side, DIR of --upstream: MindSpeed/mindspeed and its neighbours."""
    folder = pytestconfig.getoption("--upstream")
    missing = [p for p in ("MindSpeed/mindspeed", "MindSpeed-LLM/mindspeed_llm", "Megatron-LM/megatron", "verl/verl",
                              "vllm-ascend/vllm_ascend")
               if folder is None or not (folder / p).is_dir()]
    if missing:
        pytest.skip(f"--upstream {folder} holds no {', '.join(missing)}")
    return folder.resolve()
