"""Build the rollout of a 256-die configuration by verl's own vLLMRollout on npu_emulated, with smaller sizes.

Only sizes differ from the shipped YAML: those of the model, lengths and batched tokens divided by `SCALE`, parallel
sizes 1, as many prompts as fill `max_num_seqs`; and dtype, float32, which tells an error from rounding. The model's
weights are read (load_format=auto), whereas a run gets them by a weight sync. tests/loop/test_emulated_npu.py covers
experts over ranks, MC2 and dummy batches of data-parallel ranks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from typing import Any

import verl_patches.prelude_patch  # noqa: F401  before torch, as in a worker
from tests.emulation.emulated_engine import (
    Response,
    engine_worker,
    make_prompts,
    record,
    reference_responses,
    response_tokens,
    score,
    weights_written_back,
    without,
)

SCALE = 4
TOKENS = 6
TRUE_WEIGHT = "deepseekv3_256die_true_weight"


def scaled(config: Any, model: str) -> Any:
    """Return `config.actor_rollout_ref.rollout` with the sizes of one emulated die."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    rollout.dtype, rollout.load_format, rollout.tensor_model_parallel_size = "float32", "auto", 1
    rollout.prompt_length, rollout.response_length = data.max_prompt_length // SCALE, data.max_response_length // SCALE
    rollout.max_num_batched_tokens //= SCALE
    rollout.engine_kwargs.vllm.data_parallel_size = 1
    config.actor_rollout_ref.model.path = model
    return rollout


def build(config: Any, model: str) -> Any:
    """Build verl's vLLMRollout and wake it up."""
    import torch
    from transformers import AutoConfig, AutoTokenizer
    from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout

    from verl_patches.worker.memory import free_memory_device

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    free_memory_device.value = torch.npu  # as in verl's worker: each sleep is checked, the first one at the start too
    tokenizer, hf_config = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    made = vLLMRollout(model, scaled(config, model), tokenizer, hf_config)
    made.inference_engine.wake_up()
    return made


def generate(made: Any, prompts: list[list[int]], shrinks: bool = False) -> list[list[Response]]:
    """Generate each prompt's n responses by verl's own sampling parameters; return tokens and their log-probs.

    `shrinks`: 64 responses, of which 32, 16 and 8 go on for two more tokens each time.
    """
    params = [made.sampling_params.clone() for _ in prompts]
    for number, each in enumerate(params):
        each.max_tokens = TOKENS
        if shrinks:
            each.max_tokens, each.n = TOKENS + 2 * number, (32, 16, 8, 8)[number]
    outputs = made.inference_engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [response_tokens(output) for output in outputs]


def largest_difference(responses: list[list[Response]], prompts: list[list[int]], model: str) -> float:
    """Return the largest |dlogp| of sampled tokens against transformers in fp32; infinite if one is not finite."""
    reference = reference_responses(model)
    return max(score(reference, ids, made)[0] for ids, made in zip(prompts, responses, strict=True))


def decode_batches(made: Any) -> list[tuple[int, int]]:
    """Return a list that gets (decodes, prefills) of each later batch."""
    builder = engine_worker(made.inference_engine).model_runner.attn_metadata_builder
    return record(builder, "build", lambda metadata, *_, **__: (metadata.num_decodes, metadata.num_prefills))


def options_read(made: Any) -> dict[str, Any]:
    """Return recipe.rollout.ascend as the engine's own objects hold it."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm_ascend import envs
    from vllm_ascend.ascend_config import get_ascend_config

    engine, runner, read = (
        made.inference_engine.llm_engine,
        engine_worker(made.inference_engine).model_runner,
        get_ascend_config(),
    )
    layer, graphs = runner.model.model.layers[-1], read.torchair_graph_config
    scheduler = type(engine.engine_core.engine_core.scheduler).__name__
    return {
        "graphs": runner.torchair_graph_enabled and layer.self_attn.mla_attn.impl.torchair_graph_enabled,
        "graph_batch_sizes": runner.torchair_graph_batch_sizes,
        "multistream_mla": layer.self_attn.enable_multistream_mla,
        "multistream_moe": layer.mlp.experts.enable_multistream_moe,
        "view_optimize": graphs.enable_view_optimize,
        "kv_nz": layer.self_attn.mla_attn.impl.enable_kv_nz,
        "scheduler": {"Scheduler": "v1", "AscendScheduler": "ascend"}[scheduler],
        "chunked_prefill_for_mla": read.chunked_prefill_for_mla,
        "mla_pa": bool(envs.VLLM_ASCEND_MLA_PA),
        "prefix_caching": engine.vllm_config.cache_config.enable_prefix_caching,
        "top_k_optimize": TopKTopPSampler.forward_native.__name__ == "topk_topp_forward_native",
    }


def addresses(model: Any) -> dict[str, int]:
    """Return the addresses of parameters and absorbed projections, which captured graphs read."""
    from verl_patches.memory.sleep_mode import all_weights

    return {name: tensor.data_ptr() for name, tensor in all_weights(model).items()}


def sync(made: Any, folder: str) -> None:
    """Write the weights of `folder` through the direct weight sync's map; parameters that it missed would be NaN."""
    from verl.utils.vllm_utils import patch_vllm_moe_model_weight_loader

    from tests.reshard.cases import write_through
    from tests.rollout.engine_rank import hf_tensors
    from verl_patches.layout.inventory import build_inventory
    from verl_patches.memory.live_memory import post_load
    from verl_patches.reshard.destination import learn_destinations

    model, tensors = engine_worker(made.inference_engine).model_runner.model, dict(hf_tensors(folder))
    patch_vllm_moe_model_weight_loader(model)
    write_through(learn_destinations(model, build_inventory(folder), rank=0), tensors)
    post_load(model)
    made.inference_engine.llm_engine.reset_prefix_cache()


def prompts_for(config: Any) -> list[list[int]]:
    """Make as many prompts as fill the replica with their n responses; the longest has the scaled maximum length."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_prompt_length // SCALE
    count = rollout.engine_kwargs.vllm.max_num_seqs // rollout.n
    return make_prompts([longest, longest - 100, 5, 1 + longest // 2][:count])


def start(model: str, name: str, overrides: list[str]) -> tuple[Any, Any]:
    """Set the configuration's variables in this process and return the configuration and its rollout."""
    from tests.runs import composed, trainer_config
    from verl_patches.run.environment import worker_environment

    run = composed(name, overrides)
    config = trainer_config(run)
    wanted = {key: value for key, value in worker_environment(run).items() if key.startswith("VLLM_")}
    os.environ.update(wanted | {"VLLM_LOGGING_LEVEL": "ERROR"})
    return config, build(config, model)


def true_weight(model: str, other: str, overrides: list[str]) -> dict[str, Any]:
    """Return responses with the weights of `model`, with those of `other` after a sync, and with the first again."""
    config, made = start(model, TRUE_WEIGHT, overrides)
    prompts, seen, engine = prompts_for(config), decode_batches(made), made.inference_engine.llm_engine
    responses = generate(made, prompts)
    found = {
        "worst": [largest_difference(responses, prompts, model)],
        "responses": [len(each) for each in responses],
        "mixed": sum(decodes > 0 and prefills > 0 for decodes, prefills in seen),
        "decodes": max(decodes for decodes, prefills in seen if not prefills),
        "options": engine.vllm_config.additional_config,
        "read": options_read(made),
    }
    runner = engine_worker(made.inference_engine).model_runner
    sizes = record(runner, "_get_torchair_lazy_compiled_model", lambda made, batch_size: batch_size)
    found["worst"].append(largest_difference(generate(made, prompts, shrinks=True), prompts, model))
    found["graphs"] = sorted(set(sizes))
    before = addresses(engine_worker(made.inference_engine).model_runner.model)
    for folder in (other, model):
        sync(made, folder)
        found["worst"].append(largest_difference(generate(made, prompts[:2]), prompts[:2], folder))
    found["moved"] = [
        name
        for name, place in addresses(engine_worker(made.inference_engine).model_runner.model).items()
        if before[name] != place
    ]
    return found


def sample(llm: Any) -> list[Response]:
    """Sample a response to each prompt by top-k."""
    from vllm import SamplingParams

    shared = {"temperature": 1.0, "top_k": 50, "max_tokens": 5, "logprobs": 0, "ignore_eos": True}
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts((5, 17, 1, 140, 64))]
    params = [SamplingParams(**shared, seed=number) for number in range(len(prompts))]
    return [response_tokens(output)[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def answers(made: Any) -> list[Response]:
    """Return responses before sleep, after wake-up with weights written back, and with prompts in the prefix cache."""
    llm = made.inference_engine
    found = sample(llm)
    llm.mark_weights_written(last=False)
    with weights_written_back(llm):
        llm.sleep(1)
        llm.wake_up()
    llm.mark_weights_written(last=False)
    return found + sample(llm) + sample(llm)


def switches(model: str, table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {name: `answers` of each line of `table`, "read": {name: recipe.rollout.ascend of the engine}}.

    A line has `keys` of recipe.rollout.ascend, `more` overrides, and `without`: patches whose originals are in place.
    The first must switch top_k_optimize off: vllm-ascend reads its variable once a process. "balanced routing" is the
    last engine once more, with other experts.
    """
    refresh = (
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.refresh=true"  # one process, many engines
    )
    from verl_patches.emulation.npu import memory_pool

    found: dict[str, Any] = {"read": {}}
    for name, line in table.items():
        keys = [f"recipe.rollout.ascend.{key}" for key in line.get("keys", ())]
        overrides = ["level=tuned", *keys, *line.get("more", ()), refresh]
        made = start_again(model, overrides, line.get("without", []), first=not found["read"])
        found[name], found["read"][name] = answers(made), options_read(made)
        last = name == list(table)[-1]
        if last:
            os.environ["VLLM_ENABLE_FIX_ROUTE"] = "1"
            found["balanced routing"] = answers(made)
        del made
        gc.collect()
        memory_pool.empty_cache()  # as a device does when an engine has ended
    return found


def start_again(model: str, overrides: list[str], rows: list[str], first: bool) -> Any:
    """Build verl's rollout with upstream's objects in place of `rows`; after the first one top-k is optimised."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    rotary_embedding._ROPE_DICT.clear()  # otherwise engines of one process share their rotary tables
    if not first:
        from vllm_ascend.patch.worker.patch_common import patch_sampler

        TopKTopPSampler.forward_native = patch_sampler.topk_topp_forward_native
    with without(rows):
        return start(model, TRUE_WEIGHT, overrides)[1]
