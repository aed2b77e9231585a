"""What the test of the rollout's sleep and wake runs in a real engine."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from tests.emulation.emulated_engine import live_bytes, refused
from tests.rollout import engine_rank
from verl_patches.memory import measure
from verl_patches.reshard.live_memory import ABSORBED, post_load

CYCLES, EVERY = 50, 10


def sampled(llm) -> list[list[int]]:
    """Tokens of some prompts, drawn with one seed."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(begin, begin + 9))} for begin in (3, 40, 77)]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def cycle(llm, weights: dict[str, torch.Tensor], sync: bool = True, derive: bool = True) -> None:
    """One step of training from the engine's side, as verl 0.4.0 does it; `weights`: vLLM's parameters by name."""
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    if sync:
        model = engine_rank.model_of(llm)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
        if derive:
            post_load(model)
        llm.weights_written(last=False)
    llm.wake_up(tags=["kv_cache"])


def cycles(folder: Path, rollout: dict) -> dict:
    """Fifty steps of a real engine whose absorbed projections are copies, as vllm-ascend's; then what is refused."""
    from vllm import SamplingParams

    llm = engine_rank.verl_rollout(folder, **rollout).inference_engine  # asleep
    model, config = engine_rank.model_of(llm), llm.llm_engine.vllm_config
    found = {"sleep_mode": config.model_config.enable_sleep_mode, "while_asleep": refused(lambda: sampled(llm))}
    llm.wake_up()
    for layer in model.model.layers:
        impl = layer.self_attn.mla_attn.impl
        for name in ABSORBED:
            setattr(impl, name, getattr(impl, name).clone())
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    other = {**weights, name: weights[name].flip(1).contiguous()}
    found["tokens"] = [sampled(llm)]  # weights that vLLM has loaded survive the sleep after which it is woken first
    cycle(llm, weights)
    found["rss"] = []
    found["bytes"], found["blocks"] = [live_bytes()], {config.cache_config.num_gpu_blocks}
    for number in range(CYCLES):
        cycle(llm, weights)
        found["blocks"].add(config.cache_config.num_gpu_blocks)
        if number % EVERY == EVERY - 1:
            found["tokens"].append(sampled(llm))
            found["bytes"].append(live_bytes())
            found["rss"].append(psutil.Process().memory_info().rss)  # also memory below no tensor
    llm.llm_engine.add_request("left", {"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=4))
    found["unfinished"] = refused(llm.sleep)
    llm.llm_engine.abort_request(["left"])
    caches = list(measure.tensors_in(measure.kv_caches(llm)))
    llm.sleep(level=1)
    found["asleep"] = [live_bytes(), sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *caches))]
    llm.wake_up()
    found["cache"] = [len(caches), sum(each.count_nonzero().item() for each in caches)]
    found["not_filled"] = refused(lambda: sampled(llm))
    cycle(llm, other)
    found["other"] = sampled(llm)
    cycle(llm, weights)
    cycle(llm, other, derive=False)
    found["not_derived"] = sampled(llm)
    held = [parameter.clone() for parameter in model.parameters()]
    cycle(llm, weights)
    found["leak"] = [live_bytes(), sum(each.nbytes for each in held)]
    llm.weights_written(last=True)  # recipe.weight_sync.enabled=false after its first sync
    cycle(llm, weights, sync=False)
    found["tokens"].append(sampled(llm))
    return found
