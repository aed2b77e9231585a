"""Build an engine and generate with one row off at a time, each in a fork.

Rows that must be in place before vLLM is imported are tried before it is; for the others the import is paid once.
"""

from __future__ import annotations

import json
import os
import subprocess
import traceback

EARLY = ("platform.vllm_version", "platform.vllm_platform")


def apply(rows, off: str) -> None:
    """Put rows in place, without those of torch.cuda (this process has no training side) and without `off`."""
    from verl_patches.patching import engine
    from verl_patches.patching.switches import Switches

    patterns = [f"-{row.id}" for row in rows if row.id == off or row.id.startswith("platform.torch_")]
    engine.of_process.value = engine.Engine(rows, Switches("pypi", "cpu", tuple(patterns)))  # RolloutEngine asks for it
    engine.of_process.value.apply()


def generate(model: str) -> list:
    """What verl does: import, build with its arguments, sleep, wake, generate; greedy tokens and log-probs."""
    import torch.distributed as dist
    import verl.third_party.vllm  # noqa: F401  reads the version of vllm
    from vllm import LLM, SamplingParams

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    on = "enable_sleep_mode enforce_eager disable_custom_all_reduce disable_mm_preprocessor_cache enable_prefix_caching"
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "enable_chunked_prefill": False, "limit_mm_per_prompt": None}
    backend = {"distributed_executor_backend": "external_launcher", **dict.fromkeys(on.split(), True)}
    llm = LLM(model=model, dtype="float32", seed=0, **sizes, **backend)
    llm.sleep(level=1)
    llm.wake_up()
    params = SamplingParams(temperature=0.0, logprobs=0, max_tokens=4, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(3, 40))}, {"prompt_token_ids": [9, 8, 7]}]
    done = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    steps = [zip(one.token_ids, one.logprobs, strict=True) for one in done]
    return [[(token, round(step[token].logprob, 4)) for token, step in sequence] for sequence in steps]


def forked(work) -> str:
    """Run `work` in a fork: "" or the last line of its traceback."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = work()
        except BaseException as error:
            traceback.print_exc()
            answer = f"{type(error).__name__}: {str(error)[-300:]}"
        os.write(write, answer.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def without_each(model: str, names: list[str]) -> dict[str, str]:
    """{row: "" or what went wrong without it}; "" is the key of the run with all rows."""
    os.environ.pop("VERL_PATCHES", None)  # or vLLM's plugin would put every row in place
    import torch._inductor  # noqa: F401  the slow part of importing vLLM, done before any fork
    import transformers  # noqa: F401

    from verl_patches.catalog import all_rows

    def early(name: str) -> str:
        apply(all_rows(), name)
        generate(model)
        return ""

    def late(name: str) -> str:
        apply([row for row in all_rows() if row.id not in EARLY], name)
        if name == "platform.vllm_inspect":
            subprocess.run = _no_subprocess
        return json.dumps(generate(model))

    found = {name: forked(lambda name=name: early(name)) for name in names if name in EARLY}
    apply([row for row in all_rows() if row.id in EARLY], "")
    import verl.third_party.vllm  # noqa: F401
    import vllm.model_executor.models.deepseek_v2
    import vllm.worker.cpu_worker  # noqa: F401

    right = forked(lambda: late(""))
    found[""] = "" if right.startswith("[[") else right
    for name in (name for name in names if name and name not in EARLY):
        answer = forked(lambda name=name: late(name))
        found[name] = "" if answer == right else answer or "other numbers"
    return found


def _no_subprocess(*args, **kwargs):
    raise RuntimeError("a second interpreter was about to be started")
