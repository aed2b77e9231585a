"""Test engines on several ranks on Ray: responses equal to one rank's and transformers', and each rank's weights.

tests/loop/test_chains.py has an eval of a run on a CPU.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tools.inference.reference import greedy_texts
from tests.weights.cases import read_folder, write_checkpoint
from verl_patches.model.tiny import make_tiny_model
from verl_patches.weights.manifest import small_files

PROMPTS = ["1 2 3", [{"role": "user", "content": "A B C D"}], "small a b"]
SHAPE = "model/deepseekv3_tiny_256experts.json"  # vllm-ascend's routing is that of 256 experts
GREEDY, SAMPLED = ("--temperature", "0", "--max-tokens", "8"), ("--n", "2", "--seed", "7", "--max-tokens", "8")
EXPERTS = "recipe.rollout.enable_expert_parallel=true"
DP2, TP2 = (
    ("recipe.rollout.data_parallel_size=2", EXPERTS),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", EXPERTS),
)


def use(folder, commands, main=None):
    """Run the commands in one process, or one by `python -m`, with a line for chat."""
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    words = [list(map(str, command)) for command in commands]
    job = ["-m", main, *words[0]] if main else [str(ROOT / "tests/loop/use_job.py"), json.dumps(words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *job], cwd=folder, env=env, input="A B C D\n", capture_output=True, text=True
    )


def responses(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [[(each["tokens"], each["text"]) for each in line["responses"]] for line in lines]


@pytest.mark.nightly
@pytest.mark.upstream
def test_two_emulated_dies_write_what_one_writes(tmp_path, a3_sources):
    """Compare sampled responses of DP2 EP2 with one rank's, a greedy chat of DP2 and greedy TP2 with transformers'."""
    upstream = a3_sources("verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM", "vllm-ascend")[0].parent
    model = make_tiny_model(tmp_path / "model", overrides=json.loads((ROOT / "configs" / SHAPE).read_text()))
    given = ["--upstream", upstream, "recipe.line=a3", "recipe.platform=npu_emulated", "trainer.device=npu"]
    given += [f"recipe.model_shape={SHAPE}", "recipe.train.distributed_timeout_minutes=18"]
    out = {name: tmp_path / f"{name}.jsonl" for name in ("sampled", "alone", "tp2")}
    commands = [
        ["generate", model, "in.jsonl", out["sampled"], *SAMPLED, *given, *DP2],
        ["chat", model, *GREEDY, "--json", *given, *DP2],
        ["generate", model, "in.jsonl", out["tp2"], *GREEDY, *given, *TP2],
        ["generate", model, "in.jsonl", out["alone"], *SAMPLED, *given],
    ]
    done = use(tmp_path, commands)
    assert done.returncode == 0, done.stderr[-5000:]
    chat = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    found, expected = {name: responses(path) for name, path in out.items()}, greedy_texts(model, PROMPTS, 8)
    assert [made for (made,) in found["tp2"]] == expected
    assert found["sampled"] == found["alone"] and len(found["alone"][0]) == 2
    assert all(first != second for first, second in found["alone"])  # the control: they are sampled
    assert chat["text"] == expected[1][1]  # one replica has nothing to do, from the first step on


@pytest.mark.slow
def test_an_error_of_a_rank_ends_the_command_in_one_sentence(tiny_model, tmp_path):
    """Change bytes, so that they are not those of the manifest, which the ranks find as they read."""
    config = json.loads((tiny_model / "config.json").read_text())
    model = write_checkpoint(tmp_path / "model", read_folder(tiny_model), config, {"step": 1})
    for path in small_files(tiny_model):
        shutil.copy(path, model)
    file = max(model.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(-8, os.SEEK_END)
        opened.write(b"damaged!")
    done = use(tmp_path, [["generate", model, "in.jsonl", "out.jsonl", *GREEDY, *DP2]], main="verl_patches")
    assert done.returncode == 1, done.stderr
    assert "expected sha256" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_rank_reads_no_experts_of_other_ranks(run_warm, tiny_model):
    """Check by vLLM's own maps; without a map, in an engine without expert parallelism, a rank reads all."""
    code = """
import sys, torch
from verl_patches.tools.inference.engine import _read_tensors, remote_experts
from verl_patches.weights.source import open_source
source, model = open_source(__import__('pathlib').Path(sys.argv[1])), torch.nn.Module()
experts = sorted({name.rsplit('.', 2)[0] for name in source.tensors if '.experts.' in name})
layer, number = experts[0].rsplit('.', 1)[0], sum(name.startswith(experts[0].rsplit('.', 1)[0]) for name in experts)
at = model
for word in layer.split('.'):
    at.add_module(word, torch.nn.Module()); at = getattr(at, word)
assert remote_experts(model) == set()
at.expert_map = torch.tensor([-1] * (number // 2) + list(range(number - number // 2)))
out = remote_experts(model)
assert out == {f'{layer}.{e}' for e in range(number // 2)}, out
read = {name for name, _ in _read_tensors(source, out)}
assert source.tensors.keys() - read == {n for n in source.tensors if n.rsplit('.', 2)[0] in out} != set()
assert {name for name, _ in _read_tensors(source)} == source.tensors.keys()
"""
    run_warm(code, str(tiny_model), patches="line=pypi,platform=cpu").check()


def test_an_engine_has_the_token_budget_of_training_where_it_splits_prompts(run_warm):
    code = """
from tests.runs import composed
from verl_patches.tools.inference.engine import token_budget
def budgets(config, *given):
    run = composed(config, [*given, "actor_rollout_ref.rollout.max_num_batched_tokens=1024"])
    return [token_budget(run, length) for length in (512, 4096)]
large = "deepseekv3_256die_true_weight"
assert budgets(large, "level=tuned") == [1024, 1024]
assert budgets(large) == budgets("deepseekv3_tiny_cpu") == [1024, 4096]  # the Ascend scheduler takes prompts whole
"""
    run_warm(code, patches="line=pypi,platform=cpu").check()
