"""Test objectives on fixed data in the loop: loss and gradient norm of step 1 as in transformers; no rollout engine."""

import math

import pytest
import torch
from loop_runs import read_metrics, resume_overrides
from omegaconf import OmegaConf
from pyarrow import parquet
from torch.nn.functional import logsigmoid

from verl_patches.weights.manifest import CRITIC, rank_file_names, read_manifest

pytestmark = pytest.mark.slow
IN_ORDER = "data.shuffle=false"
DPO, SFT, RM = (("--steps", "2", f"algo={name}", IN_ORDER, "trainer.save_freq=1") for name in ("dpo", "sft", "rm"))


@pytest.fixture(scope="module")
def peer():
    """Return peer(run, objective) -> (loss, gradient norm) of the run's first batch by transformers' DeepSeek-V3."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def first_step(run, objective):
        config = OmegaConf.load(run.folder / "config.yaml")
        folder, limit = config.actor_rollout_ref.model.path, config.data.max_response_length
        tokenizer = AutoTokenizer.from_pretrained(folder)
        kind = {"torch_dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(folder, **kind).train()
        rows = parquet.read_table(config.data.train_files[0]).to_pylist()[: config.data.train_batch_size]

        def log_prob(row, column):
            prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
            ids = [*tokenizer.encode(row[column], add_special_tokens=False), tokenizer.eos_token_id]
            assert len(ids) <= limit
            logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).sum(), len(ids)

        if objective == "sft":
            sums, counts = zip(*(log_prob(row, "response") for row in rows), strict=True)
            loss = -sum(sums) / sum(counts)
        else:  # the reference is the model itself
            chosen, rejected = (torch.stack([log_prob(row, c)[0] for row in rows]) for c in ("chosen", "rejected"))
            margin = chosen - rejected
            loss = -logsigmoid(0.1 * (margin - margin.detach())).mean()
        loss.backward()
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        return float(loss.detach()), math.sqrt(sum(map(float, squares)))

    return first_step


@pytest.mark.parametrize(("objective", "arguments"), [("dpo", DPO), ("sft", SFT)])
def test_the_first_step_is_that_of_transformers(start, peer, objective, arguments):
    run = start(*arguments)
    loss, norm = peer(run, objective)
    first, second = run.steps
    assert first["objective"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert second["objective"]["loss"] != first["objective"]["loss"]
    assert ("log_prob" in first["seconds"]) == ("ref" in first["seconds"]) == (objective == "dpo")


def test_no_rollout_engine_is_started(start):
    run = start(*DPO)
    assert run.summary["exit"] == "ok" and run.summary["layout"]["rollout"] == "none: fixed data"
    for step in run.steps:
        assert step["reward"] is step["sync"] is step["logprob_delta"] is None
        assert step["memory"]["violations"]["count"] == 0
        assert not {"rollout", "reshard"} & step["seconds"].keys()
    rows = [row for row in run.summary["patches"] if row["process"] == "worker 0"]
    waiting = {row["target"] for row in rows if row["state"] == "waiting"}
    assert "vllm.entrypoints.llm:LLM" in waiting and {row["state"] for row in rows} == {"active", "waiting", "off"}


@pytest.mark.nightly
@pytest.mark.parametrize(("algorithm", "first"), [("ipo", 25.0), ("kto", 0.5)])
def test_the_first_loss_is_that_of_a_policy_that_is_its_reference(smoke, algorithm, first):
    """Check the closed forms: IPO (1 / (2 beta))^2 with beta 0.1; KTO 1 - sigmoid(0)."""
    run = smoke("--steps", "2", f"algo={algorithm}")
    before, after = (step["objective"]["loss"] for step in run.steps)
    assert before == pytest.approx(first, rel=1e-4) and after != pytest.approx(first, rel=1e-3)
    assert run.summary["exit"] == "ok" and all(step["grad_norm"] > 0 for step in run.steps)


def assert_trains_alone(run):
    """Assert that only the value model trains in an objective's run of two steps."""
    for step in run.steps:
        assert step["grad_norm"] is None and step["critic"]["grad_norm"] > 0 and step["objective"]["loss"] > 0
        assert step["memory"]["violations"]["count"] == 0
        assert not step["memory"]["phases"]["update_critic"]["bytes"].get("actor_params")
    assert run.summary["exit"] == "ok" and len({step["objective"]["loss"] for step in run.steps}) == 2


def test_a_reward_model_trains_alone(start):
    assert_trains_alone(start(*RM))


@pytest.mark.nightly
def test_a_process_reward_model_trains_alone(smoke):
    run = smoke("--steps", "2", "algo=prm")
    assert_trains_alone(run)
    assert all(0 < step["objective"]["accuracy"] <= 1 for step in run.steps)


@pytest.mark.nightly
def test_a_reward_model_goes_on_from_its_checkpoint(smoke):
    whole = smoke(*RM)
    saved = whole.folder / "checkpoints" / "global_step_1"
    names, of_critic = ({file.name for file in read_manifest(folder).files} for folder in (saved, saved / CRITIC))
    assert (
        not {*rank_file_names(2)} & names and {*rank_file_names(2), "tokenizer.json"} <= of_critic
    )  # a model's folder
    resumed = smoke(*RM, *resume_overrides(whole, 1))
    assert read_metrics(resumed, "objective", "critic") == read_metrics(whole, "objective", "critic")[1:]
