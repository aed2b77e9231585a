"""Build real vLLM DeepSeek-V3 models rank by rank, in a process of its own.

vLLM's own initialize_model_parallel forms the groups. Each group gets torch's fake backend, which pretends that the
other ranks exist, and no shared-memory queue, which would wait for them.
"""

import contextlib
import functools
import json
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from verl_patches.emulation import rows as cpu_rows
from verl_patches.patching.engine import start_engine
from verl_patches.patching.switches import switches_from_environment

# vLLM's stand-ins without those that wrap another patch, because the wheel's compiled ops do not load here
start_engine([row for row in cpu_rows.VLLM if not row.needs], switches_from_environment()).apply()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM  # noqa: E402

_new_group = dist.new_group


@functools.wraps(_new_group)
def fake_group(ranks=None, *args, **kwargs):
    return _new_group(ranks, backend="fake")


_init_group = parallel_state.init_model_parallel_group


def quiet_group(group_ranks, local_rank, backend, use_message_queue_broadcaster=False, group_name=None):
    """Make a group without the shared-memory queue, which waits for its other ranks to connect."""
    return _init_group(group_ranks, local_rank, backend, False, group_name)


parallel_state.init_model_parallel_group = quiet_group
# The real one broadcasts a pickled object; under the fake backend other ranks "receive" uninitialised sizes.
parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * dist.get_world_size(group)
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # fail if another such broadcast is added


def engine_config(case: dict, rank: int):
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(case["config"]))
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        tensor_parallel_size=case["tp"],
        enable_expert_parallel=case["expert_parallel"],
        distributed_executor_backend="external_launcher",
        enforce_eager=True,
    ).create_engine_config()
    # Set as for an engine of several DP ranks in verl's processes: EngineArgs would start vLLM's own DP bootstrap.
    config.parallel_config.data_parallel_size = case["dp"]
    config.parallel_config.data_parallel_rank = rank // case["tp"] % case["dp"]
    return config


@contextlib.contextmanager
def rank_model(case: dict, rank: int) -> Iterator[DeepseekV3ForCausalLM]:
    """Build vLLM's model of one rank inside its groups.

    case: {config: HF config, instances, dp, tp, expert_parallel}.
    """
    world_size = case["instances"] * case["dp"] * case["tp"]
    config = engine_config(case, rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with set_current_vllm_config(config):
        parallel_state._WORLD = parallel_state.init_world_group(list(range(world_size)), 0, "fake")
        parallel_state.initialize_model_parallel(case["tp"], backend="fake")
        torch.set_default_dtype(torch.bfloat16)
        model = DeepseekV3ForCausalLM(vllm_config=config)
        torch.set_default_dtype(torch.float32)
        yield model
    parallel_state.destroy_model_parallel()
    parallel_state._WORLD = None
    dist.destroy_process_group()


def groups() -> dict[str, list[int]]:
    """Return the ranks of this rank's groups, inside `rank_model`."""
    return {name: getattr(parallel_state, f"_{name.upper()}").ranks for name in ("tp", "dp", "ep")}


dist.new_group = torch.distributed.new_group = fake_group
