"""Test generate on the emulated NPU: vLLM's V1 with vllm-ascend, weights by the reader of all formats."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tools.inference.reference import greedy_texts
from verl_patches.model.tiny import make_tiny_model

PROMPTS = ["1 2 3", [{"role": "user", "content": "A B C D"}]]
SHAPE = "model/deepseekv3_tiny_256experts.json"  # vllm-ascend's routing is that of 256 experts


@pytest.mark.slow
@pytest.mark.upstream
def test_greedy_texts_on_the_emulated_npu_are_those_of_transformers(tmp_path, a3_sources):
    upstream = a3_sources("verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM", "vllm-ascend")[0].parent
    shape = json.loads((ROOT / "configs" / SHAPE).read_text())
    model, prompts, output = (
        make_tiny_model(tmp_path / "model", overrides=shape),
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
    )
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    given = ["--temperature", "0", "--max-tokens", "8", "--upstream", str(upstream), "recipe.line=a3"]
    given += ["recipe.platform=npu_emulated", "trainer.device=npu", f"recipe.model_shape={SHAPE}"]
    given += ["recipe.train.distributed_timeout_minutes=18", "--json"]
    given += ["actor_rollout_ref.rollout.max_num_batched_tokens=16"]  # below the lengths, so that prompts are split
    command = [sys.executable, "-m", "verl_patches", "generate", str(model), str(prompts), str(output), *given]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["rows"] == 2  # and nothing else on standard output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = [(line["responses"][0]["tokens"], line["responses"][0]["text"]) for line in lines]
    assert found == greedy_texts(model, PROMPTS, 8)
