"""Start one kind of process of line a3 on platform npu as production does, without a device.

    python boot_job.py KIND FOLDER      KIND: driver | controller | worker

FOLDER holds model/ (config.json, tokenizer) and data.parquet. The driver writes driver.pickle, which holds what Ray
would carry to other processes: set-up hook, task and configuration; the others start from it. Each process writes
KIND.json: state of each patch, imported modules, and "failed": "step: error" for the first step that raised, if any.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import OmegaConf

CONFIG = "deepseekv3_256die_true_weight"
# Ray and verl set these for a worker (verl.single_controller.ray.base.RayWorkerGroup._init_with_resource_pool);
# DISABLE_WORKER_INIT, because ActorRolloutRefWorker is made inside another worker, which has registered the group
# already (verl.single_controller.ray.base.create_colocated_worker_cls).
WORKER = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "256", "LOCAL_WORLD_SIZE": "16", "WG_PREFIX": "group",
    "WG_BACKEND": "ray", "DISABLE_WORKER_INIT": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500",
}  # fmt: skip
SERVERS: list[Any] = []  # keeps them alive as long as the process
# verl imports these only if rollout.name is sglang (verl.workers.megatron_workers.ActorRolloutRefWorker._build_rollout)
NOT_CHOSEN = ("verl.workers.rollout.sglang_rollout", "verl.workers.sharding_manager.megatron_sglang")


class Reached(Exception):
    """Report that the process came to the first call that needs Ray or a device."""


def stop(*args: Any, **kwargs: Any) -> Any:
    """Raise Reached with the arguments, in place of a call that needs Ray or a device."""
    raise Reached(*args)


def head() -> str:
    """Start a server that answers as the head of a Ray without nodes, and return its HOST:PORT."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    class Head(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
        def CheckAlive(self, request: Any, context: Any) -> Any:
            return gcs_service_pb2.CheckAliveReply()

    server = grpc.server(ThreadPoolExecutor(1))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(Head(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    SERVERS.append(server)
    return f"127.0.0.1:{port}"


def overrides(folder: Path, address: str) -> list[str]:
    """Return Hydra overrides for the model and data in `folder` and for the head of Ray."""
    files = [f"data.{kind}_files={folder / 'data.parquet'}" for kind in ("train", "val")]
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        *files,
        f"recipe.output_root={folder / 'outputs'}",
        f"recipe.ray_address={address}",
        "level=tuned",  # which has the most rows
    ]


def driver(folder: Path, found: dict[str, Any]) -> None:
    """Run verl_patches/main.py until it starts Ray."""
    with step(found, "verl_patches.main"):
        driver = importlib.import_module("verl_patches.main")
        import ray

        from verl_patches.catalog import platform_rows
        from verl_patches.plan.memory_plan import with_planned_keys
        from verl_patches.run.compose import compose

        run = with_planned_keys(compose(CONFIG, overrides(folder, head()), platform_rows))
        OmegaConf.save(run.verl, folder / driver.CONFIG_FILE)
        (folder / driver.FACTS_FILE).write_text(run.text())
        config = driver.read_run(run.text(), OmegaConf.load(folder / driver.CONFIG_FILE)).verl
        OmegaConf.set_readonly(config, False)  # as main.Controller does

        # ray._private.worker.init hands it the runtime_env, below the row that wraps ray.init
        os.environ["RAY_RUNTIME_ENV_HOOK"] = f"{__name__}.{stop.__name__}"
        try:
            driver.main([str(folder)])
        except Reached as reached:
            (runtime_env,) = reached.args
            found["reached"] = "ray.init"
        finally:
            del os.environ["RAY_RUNTIME_ENV_HOOK"]
        hook = runtime_env.pop("worker_process_setup_hook")
        (folder / "driver.pickle").write_bytes(ray.cloudpickle.dumps((hook, driver.run_task_runner, config)))
        found["env_vars"] = runtime_env["env_vars"]


def controller(folder: Path, found: dict[str, Any]) -> None:
    """Run a Ray worker process with verl's TaskRunner until the worker groups are made."""
    import ray

    hook, task, config = ray.cloudpickle.loads((folder / "driver.pickle").read_bytes())
    with step(found, "set-up hook"):
        hook()
    with step(found, "verl.trainer.main_ppo"):
        importlib.import_module("verl.trainer.main_ppo")
    with step(found, "TaskRunner.run"):
        trainer = importlib.import_module("verl.trainer.ppo.ray_trainer")
        trainer.RayPPOTrainer.init_workers = stop
        try:
            task(config)
        except Reached:
            found["reached"] = "RayPPOTrainer.init_workers"


def worker(folder: Path, found: dict[str, Any]) -> None:
    """Run a worker process of verl's group: start the engine, make ActorRolloutRefWorker, import its lazy modules."""
    import ray

    hook, _, config = ray.cloudpickle.loads((folder / "driver.pickle").read_bytes())
    os.environ.update(WORKER)
    sys.modules["vllm._C"] = None  # the image builds vLLM for no device (VLLM_TARGET_DEVICE=empty): no compiled ops
    prepare_engine(hook, OmegaConf.to_container(config.actor_rollout_ref), found)
    with step(found, "verl.workers.megatron_workers"):
        importlib.import_module("verl.single_controller.ray.megatron")
        workers = importlib.import_module("verl.workers.megatron_workers")
    with step(found, "ActorRolloutRefWorker.__init__"):
        first_call_of_a_device(lambda: workers.ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout"), found)
    with step(found, "imports of ActorRolloutRefWorker's methods"):
        found["lazy"] = lazy_imports(workers)
        for name in found["lazy"]:
            importlib.import_module(name)
    with step(found, "vLLM's platform and plugins"):
        found.update(engine())
    with step(found, "modules of vllm_ascend"):
        camem = importlib.import_module("vllm_ascend.device_allocator.camem")
        found["sleep mode"] = camem.camem_available
        found["not imported"] = {name: why for name in vllm_ascend_modules() if (why := refusal(name))}


def prepare_engine(hook: Callable[[], None], engine: dict[str, Any], found: dict[str, Any]) -> None:
    """Run the set-up hook, then import verl, which prepares MindSpeed; note after each which library came first."""
    import ray
    from ray.experimental import internal_kv

    from verl_patches.trainer import worker_settings

    with step(found, "set-up hook"):
        hook()
        found["first of the engine after the hook"] = first_of_engine()
    with step(found, "verl"):
        sent = json.dumps({"engine": engine, "network": None})  # as send_settings stores it; there is no Ray here
        with (
            mock.patch.object(ray, "is_initialized", lambda: True),
            mock.patch.object(worker_settings, "_settings_key", lambda: "key"),
            mock.patch.object(internal_kv, "_internal_kv_get", {"key": sent}.get),
        ):
            importlib.import_module("verl")
        found["first of the engine after verl"] = first_of_engine()


def first_of_engine() -> str | None:
    """Return which of MindSpeed-LLM and Megatron was imported first in this process; None without either."""
    packages = (name.partition(".")[0] for name in sys.modules)  # in the order in which imports ended
    return next((package for package in packages if package in ("mindspeed_llm", "megatron")), None)


def first_call_of_a_device(call: Callable[[], Any], found: dict[str, Any]) -> None:
    """Call until torch.distributed would start HCCL; raise RuntimeError unless our engine's start asks for it."""
    import torch

    def reached(*args: Any, **kwargs: Any) -> None:
        caller = traceback.extract_stack()[-2]
        found["reached"] = f"{Path(caller.filename).stem}.{caller.name}"
        if found["reached"] != "start._start_distributed":
            raise RuntimeError(f"the process group was asked for by {found['reached']}, before MindSpeed's arguments")
        raise Reached

    torch.distributed.init_process_group, kept = reached, torch.distributed.init_process_group
    try:
        call()
    except Reached:
        pass
    finally:
        torch.distributed.init_process_group = kept


def lazy_imports(workers: Any) -> list[str]:
    """Return the modules that methods of ActorRolloutRefWorker import, without NOT_CHOSEN."""
    tree = ast.parse(Path(workers.__file__).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ActorRolloutRefWorker")
    names = [node.module for node in ast.walk(body) if isinstance(node, ast.ImportFrom)]
    return [name for name in dict.fromkeys(names) if name not in NOT_CHOSEN]


def engine() -> dict[str, Any]:
    """Return the class of vLLM's platform, found by entry point, and those it and the registry name for DeepSeek-V3."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.utils import resolve_obj_by_qualname

    load_general_plugins()
    import torch
    from vllm.model_executor.models import ModelRegistry

    worker = importlib.import_module("vllm_ascend.worker.worker_v1").NPUWorker  # platform.py names it for engine V1
    backend = current_platform.get_attn_backend_cls(None, 576, torch.bfloat16, "auto", 128, True, True)
    model = ModelRegistry.models["DeepseekV3ForCausalLM"].load_model_cls()
    attention = resolve_obj_by_qualname(backend)
    found = {"platform": type(current_platform), "model": model, "worker": worker, "attention": attention}
    return {name: f"{cls.__module__}.{cls.__qualname__}" for name, cls in found.items()}


def vllm_ascend_modules() -> Iterator[str]:
    """Yield the name of each module of vllm_ascend, by its files."""
    import vllm_ascend

    for path in sorted(Path(vllm_ascend.__path__[0]).rglob("*.py")):
        parts = path.relative_to(Path(vllm_ascend.__path__[0]).parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def refusal(name: str) -> str | None:
    """Return "Type: message" of the error when a module is imported, None without an error."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Failed(Exception):
    """Report that a step raised, which is noted already."""


@contextlib.contextmanager
def step(found: dict[str, Any], name: str) -> Iterator[None]:
    """Note the error of one part of a start."""
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        found["failed"] = f"{name}: {type(error).__name__}: {error}"
        raise Failed from error
    found["steps"].append(name)


def main(kind: str, folder: Path) -> None:
    """Run one start and write its findings."""
    found: dict[str, Any] = {"steps": []}
    with contextlib.suppress(Failed):
        {"driver": driver, "controller": controller, "worker": worker}[kind](folder, found)
    from verl_patches.patching.engine import current_engine

    try:
        found["rows"] = {row["id"]: [row["state"], row["reason"]] for row in current_engine().status()}
        found["targets"] = sorted(
            {s.target_module for s in current_engine().specs.values() if s.target_module in sys.modules}
        )
    except RuntimeError as error:
        found["rows"], found["targets"] = {}, []
        found.setdefault("failed", f"prelude: {error}")
    found["top level"] = sorted({name.partition(".")[0] for name in sys.modules})
    (folder / f"{kind}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
