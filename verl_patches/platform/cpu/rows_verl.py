"""CPU stand-ins around verl and Ray. No torch here."""

from verl_patches.patching.spec import PatchSpec

_CPU = frozenset({"cpu"})
_BOTH = frozenset({"pypi", "a3"})
_HERE = "verl_patches.platform.cpu.upstream_glue"


ROWS = (
    PatchSpec(
        id="platform.tensordict_cuda", stage="platform", target="tensordict.base:TensorDictBase.cuda", kind="stub",
        provider=f"{_HERE}:stay_on_cpu", platforms=_CPU, lines=_BOTH,
        why="verl/workers/megatron_workers.py:419,452 call batch.cuda() with no device test; "
            "a CPU build of torch raises.",
        exit="verl moves batches with .to(get_torch_device()) everywhere",
    ),
    PatchSpec(
        id="platform.data_to_cuda", stage="platform", target="verl.protocol:DataProto.to", kind="wrap",
        provider=f"{_HERE}:batch_stays_on_cpu", platforms=_CPU, lines=frozenset({"a3"}),
        why="verl 54c9b736 calls data.to('cuda') (verl/workers/megatron_workers.py:512,536), which a CPU build "
            "of torch refuses.",
        exit="the pins move to verl 0.4.0 or later, which asks torch.cuda.current_device()",
    ),
    PatchSpec(
        id="platform.pickle_torch_config", stage="platform",
        target="torch.utils._config_module:ConfigModule.__reduce_ex__", kind="stub",
        provider=f"{_HERE}:reduce_to_name", platforms=_CPU, lines=_BOTH,
        why="Ray 2.42's cloudpickle ships verl's worker classes by value where they close over torch 2.13's "
            "configuration modules, which do not pickle; torch 2.5 of the a3 line has no such closure.",
        exit="Ray >= 2.44 with a cloudpickle that knows ConfigModule, or torch giving it __reduce__",
    ),
)
