"""Build verl's own vLLMRollout in a rank of a rollout test, and reach its engine, its model and its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.emulation.emulated_engine import engine_model, make_prompts, record, response_tokens


def verl_rollout(model: str | Path, **overrides):
    """Build verl's vLLMRollout for a model folder by verl's own config file and `overrides` of its rollout section."""
    import verl
    from omegaconf import OmegaConf
    from transformers import AutoConfig, AutoTokenizer
    from verl.workers.rollout.vllm_rollout import vLLMRollout

    trainer = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "ppo_megatron_trainer.yaml")
    lengths = dict(prompt_length=192, response_length=64, max_num_seqs=16, temperature=1.0)
    plain = dict(dtype="float32", load_format="auto", enforce_eager=True, free_cache_engine=False, **lengths)
    config = OmegaConf.merge(trainer.actor_rollout_ref.rollout, plain, overrides)
    tokenizer, hf_config = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    return vLLMRollout(model_path=str(model), config=config, tokenizer=tokenizer, model_hf_config=hf_config)


def awake(model: str | Path, **overrides):
    """Wake up and return the engine inside verl's rollout: verl puts it to sleep as soon as it is built."""
    llm = verl_rollout(model, **overrides).inference_engine
    llm.wake_up()
    return llm


def hf_tensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each (name, tensor) of an HF folder."""
    from safetensors.torch import load_file

    for file in sorted(Path(folder).glob("*.safetensors")):
        yield from load_file(file).items()


def generate_with(llm, requests: list) -> dict:
    """Return {tokens, logprobs} of greedy responses to [prompt, length] requests; without any, join others' steps."""
    from vllm import SamplingParams

    if not requests:
        llm._run_engine(use_tqdm=False)
        return {"tokens": [], "logprobs": []}
    params = [SamplingParams(temperature=0.0, logprobs=0, max_tokens=length, ignore_eos=True) for _, length in requests]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
    responses = [response_tokens(output)[0] for output in outputs]
    return {"tokens": [tokens for tokens, _ in responses], "logprobs": [log_probs for _, log_probs in responses]}


def watch_logits(llm) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Return a list that gets each logits tensor [tokens, V] before sampling, and a function that ends this."""
    seen: list[torch.Tensor] = []
    processor = engine_model(llm).logits_processor

    def _get_logits(*args, **kwargs):
        logits = type(processor)._get_logits(processor, *args, **kwargs)
        seen.append(logits.float().clone())
        return logits

    processor._get_logits = _get_logits
    return seen, lambda: delattr(processor, "_get_logits")


def preemptions(model: str, requests: list) -> list[int]:
    """Return an engine's preemptions before and after `requests`, where 16 KV blocks of 16 tokens hold a few alone."""
    llm = awake(model, engine_kwargs={"vllm": {"num_gpu_blocks_override": 16}})
    counts = []
    for some in (requests[:1], requests, requests[:1]):
        generate_with(llm, some)
        counts.append(llm.preemptions.take())
    return counts


def preemptions_of_v1(model: str) -> tuple[int, int]:
    """Return how many of 12 requests V1 preempts, as we and as vLLM count them, where 9 KV blocks hold a few alone."""
    from vllm import LLM, SamplingParams
    from vllm.v1.engine import EngineCoreEventType
    from vllm.v1.request import Request

    from verl_patches.rollout.engine import PreemptionCounter

    limits = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    llm = LLM(model=model, dtype="float32", seed=0, enforce_eager=True, additional_config={"refresh": True}, **limits)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 9)  # leave 9 blocks of 128 tokens
    preempted = PreemptionCounter(llm.llm_engine)
    scheduler.log_stats, scheduler.make_stats = True, lambda *_: None  # vLLM notes its preemptions, and no other figure
    events = record(Request, "record_event", lambda _, request, event, *time: event)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts([116 + n for n in range(12)])]
    llm.generate(prompts, params, use_tqdm=False)
    return preempted.take(), events.count(EngineCoreEventType.PREEMPTED)
