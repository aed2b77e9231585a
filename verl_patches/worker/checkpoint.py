"""Save and load one rank's part of a checkpoint: copied to the host while the trainer waits, written during the run.

    save    waits for the previous part, updates the host copies, and writes them in a thread
    wait    waits for the part in writing: before an update, which changes the copied tensors, before a save, at the end
    load    reads weights, states, counts and generators, and compares them with the digests of the manifest

A memory group that the memory schedule has on the host needs no copy (memory/host_backed.py); weights on the device
are copied once, for the save and for their next offload. The next call of any of these methods raises errors of the
thread.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.single_controller.base.decorator import Dispatch, register

from verl_patches.heartbeat import heartbeat
from verl_patches.layout.phases import LAST_CHECKPOINT
from verl_patches.memory.host_backed import (
    HostBackedStorage,
    model_offload_state,
    optimizer_offload_state,
    single_optimizers,
    synchronise,
)
from verl_patches.memory.schedule import CRITIC
from verl_patches.patching.engine import is_on
from verl_patches.platform import NO_DEVICE
from verl_patches.reshard.rank_errors import catch_errors, raise_on_any_rank
from verl_patches.reshard.train_tensors import native_tensors, trained_inventory
from verl_patches.weights import checkpoint_files
from verl_patches.weights.checkpoint_files import CheckpointError, StoredTensor, TrainState
from verl_patches.weights.load import read_counter, wait_for_ranks
from verl_patches.weights.manifest import read_manifest
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import open_source
from verl_patches.worker import Upstream
from verl_patches.worker.memory import TrainedModel, device_type

log = logging.getLogger(__name__)


class TrainingWorker(Upstream):
    """Define what our workers of actor and critic have in common. The attribute of a feature that is off is None."""

    checkpoint: WorkerCheckpoint | None = None
    trained: TrainedModel | None = None

    def start_checkpoint(self) -> None:
        """Make `checkpoint`, which saves and loads this rank's part, if row checkpoint.parts is on."""
        if is_on("checkpoint.parts"):
            self.checkpoint = WorkerCheckpoint(self)

    def wait_for_checkpoint(self) -> None:
        """Wait for the part that is being written; call it before an update changes its tensors."""
        if self.checkpoint is not None:
            heartbeat.current_heartbeat().begin_phase(LAST_CHECKPOINT)
            self.checkpoint.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, checkpoint_path: str, *args: Any, **kwargs: Any) -> dict[str, float] | None:
        """Write this rank's part in a thread (worker/checkpoint.py); use verl's own with row checkpoint.parts off."""
        if self.checkpoint is not None:
            return self.checkpoint.save(checkpoint_path)
        return super().save_checkpoint(checkpoint_path, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, checkpoint_path: str, *args: Any, **kwargs: Any) -> None:
        """Load weights and optimizer states saved with any layout; use verl's own with row checkpoint.parts off."""
        if self.checkpoint is None:
            super().load_checkpoint(checkpoint_path, *args, **kwargs)
            return
        with self.memory.all_on_device(self.trained):
            self.checkpoint.load(checkpoint_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> None:
        """Wait until this rank's part of the last save is written."""
        assert self.checkpoint is not None  # row checkpoint.save, whose trainer calls this, needs checkpoint.parts
        self.checkpoint.wait()


class WorkerCheckpoint:
    """Save and load this rank's part of the model that `worker`, a TrainingWorker, trains."""

    def __init__(self, worker: Any):
        self.worker, self.recipe = worker, worker.recipe
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write_future: Future | None = None
        self._loads = 0

    @functools.cached_property
    def train_state(self) -> TrainState:
        """Return the train state of this rank."""
        trained, run = self.worker.trained, self.worker.run
        inventory = trained_inventory(trained.chunks, trained.hf_config, trained.groups == CRITIC)
        native, of_rank = native_tensors(trained.chunks), (run.train, dist.get_rank(), run.train_library)
        return TrainState(native, trained.optimizer, inventory, *of_rank)

    # ---- save

    def save(self, folder: str) -> dict[str, float]:
        """Start to write this rank's files into `folder`; return {copied_bytes, seconds} of the blocking part."""
        self.wait()
        started, rank = time.perf_counter(), dist.get_rank()
        if not Path(folder).is_dir():
            raise CheckpointError(
                f"{folder}: expected the folder that the trainer made, found none on the node of rank {rank}; set "
                "trainer.default_local_dir to a file system that all nodes share"
            )
        with self._on_device():
            storages, copied = self._copy_to_host()
            pieces = self.train_state.pieces_to_write()
            contents = self._piece_contents(pieces, storages)
        rest = self._other_state()
        self._write_future = self._threads.submit(checkpoint_files.write_rank, folder, rank, pieces, contents, rest)
        return {"copied_bytes": copied, "seconds": time.perf_counter() - started}

    def wait(self) -> None:
        """Wait until the last save is written; raise the error of the writing thread."""
        if self._write_future is not None:
            writing, self._write_future = self._write_future, None
            writing.result()

    def _copy_to_host(self) -> tuple[dict[int, HostBackedStorage], int]:
        """Return ({storage identity: its current host copy}, bytes copied) of all that the memory schedule can move."""
        trained, scheduled, copied = self.worker.trained, self.worker.memory.scheduled, 0
        storages: list[HostBackedStorage] = []
        if scheduled:
            models = [model_offload_state(chunk) for chunk in trained.chunks]
            copied += sum(model.copy_params_to_host() for model in models if not model.offloaded)
            storages += [storage for model in models for storage in model.params.values()]
        for one in single_optimizers(trained.optimizer):
            if _is_swap_optimizer(one) or not (scheduled or hasattr(one, "recipe_offload_state")):
                continue
            state = optimizer_offload_state(one)
            copied += state.copy_to_host()
            storages += state.storages.values()
        synchronise(storages)
        if self.recipe.platform not in NO_DEVICE:
            torch.get_device_module(self.recipe.platform).synchronize()  # MindSpeed swaps on streams of its own
        return {storage.storage._cdata: storage for storage in storages}, copied

    def _piece_contents(
        self, pieces: list[StoredTensor], storages: Mapping[int, HostBackedStorage]
    ) -> Callable[[StoredTensor], Iterator[torch.Tensor]]:
        """Return the function by which `write_rank` gets a piece's tensors; copy now those that are not on the host."""
        on_host = storages.keys() | _swapped_storages(self.worker.trained.optimizer)
        copies = {}
        for piece in pieces:
            if piece.base.untyped_storage()._cdata not in on_host:
                views = [place.tensor_view(piece.base) for place in piece.places]
                copies[piece.entry.key] = [view.detach().to("cpu", copy=True) for view in views]

        def contents(piece: StoredTensor) -> Iterator[torch.Tensor]:
            if piece.entry.key in copies:
                yield from copies[piece.entry.key]
                return
            held = storages.get(piece.base.untyped_storage()._cdata)
            for place in piece.places:
                if held is None:
                    yield place.tensor_view(piece.base)
                else:
                    at = piece.base.storage_offset() + place.offset
                    yield held.host_tensor(piece.base.dtype, place.shape, place.strides, at)

        return contents

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Bring parameters that verl itself offloads (row memory.order off) to the device inside the context."""
        if self.worker.memory.scheduled or not self.worker._is_offload_param:
            yield
            return
        from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu

        load_megatron_model_to_gpu(self.worker.trained.chunks)
        try:
            yield
        finally:
            offload_megatron_model_to_cpu(self.worker.trained.chunks)

    def _other_state(self) -> dict[str, Any]:
        """Return step counts, LR schedule and RNG states."""
        schedule = getattr(getattr(self.worker, "actor", None), "lr_schedule", None)  # a critic has none
        return {
            "step_counts": checkpoint_files.step_counts(self.worker.trained.optimizer),
            "lr_schedule_steps": None if schedule is None else schedule.num_steps,
            "generators": generator_states(self.recipe.platform),
        }

    # ---- load

    def load(self, folder: str) -> None:
        """Read a checkpoint of any layout; weights and states must be on the device.

        Collective. Every rank raises the same CheckpointError if one of them finds a damaged or missing file or tensor.
        """
        self.wait()
        state, rank = self.train_state, dist.get_rank()
        saved: dict[str, Any] = {}

        def read() -> list[str]:
            if problems := checkpoint_files.share_problems(folder, rank, dist.get_world_size()):
                return problems
            written = saved["layout"] = read_manifest(folder).layout
            saved["rest"] = checkpoint_files.read_rank_state(folder, rank if written == str(state.layout) else 0)
            source = open_source(folder)
            with self._on_device(), WeightReader(source, read_counter(key), verify=True, read_whole=True) as reader:
                checkpoint_files.load_state(state, reader)
            return []

        device, todo = device_type(self.recipe.platform), f"{folder} cannot be resumed from; choose another checkpoint"
        self._loads += 1
        key = f"verl_patches/{folder}/{self._loads}"
        # ranks' disks differ in speed: wait on the store, not in a collective that would time out
        problems = catch_errors(read)
        wait_for_ranks(folder, key, self.recipe.timeouts.load_s)
        raise_on_any_rank(problems, None, device, todo, CheckpointError)
        rest, same_layout = saved["rest"], saved["layout"] == str(state.layout)
        checkpoint_files.set_step_counts(self.worker.trained.optimizer, rest["step_counts"])
        if rest["lr_schedule_steps"] is not None:
            from verl_patches.model.mindspeed.start import actor_lr_schedule

            schedule = actor_lr_schedule(self.worker.actor)
            schedule.step(increment=rest["lr_schedule_steps"] - schedule.num_steps)
        if same_layout:
            set_generator_states(rest["generators"], self.recipe.platform)
        elif rank == 0:
            log.warning(
                "%s: layout %s, this run has %s: RNG states are not restored", folder, saved["layout"], state.layout
            )


def _is_swap_optimizer(one: Any) -> bool:
    return hasattr(type(one), "param_to_cpu_states_map")


def _swapped_storages(optimizer: Any) -> set[int]:
    """Return identities of the storages in which MindSpeed's swap optimizer keeps states on the host."""
    maps = [type(one).param_to_cpu_states_map for one in single_optimizers(optimizer) if _is_swap_optimizer(one)]
    states = [state for each in maps for state in each.values()]
    return {t.untyped_storage()._cdata for state in states for t in state.values() if t is not None}


# ---- random number generators, as JSON


def generator_states(platform: str) -> dict[str, Any]:
    """Return this process's RNG states: `checkpoint_files.generator_states`, Megatron's by name, and the device's."""
    from megatron.core import tensor_parallel

    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    saved = {
        **checkpoint_files.generator_states(),
        "megatron": {k: checkpoint_files.encode_generator(v) for k, v in states.items()},
    }
    if platform not in NO_DEVICE:
        saved["device"] = checkpoint_files.encode_generator(torch.get_device_module(platform).get_rng_state())
    return saved


def set_generator_states(saved: Mapping[str, Any], platform: str) -> None:
    """Set the states that `generator_states` returned."""
    from megatron.core import tensor_parallel

    checkpoint_files.set_generator_states(saved)
    states = {k: checkpoint_files.decode_generator(v) for k, v in saved["megatron"].items()}
    tensor_parallel.get_cuda_rng_tracker().set_states(states)
    if "device" in saved:
        torch.get_device_module(platform).set_rng_state(checkpoint_files.decode_generator(saved["device"]))
