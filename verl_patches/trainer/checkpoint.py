"""Save, complete, remove and resume the checkpoints of a run; this is the trainer process's part.

verl's trainer calls `_save_checkpoint` after the update of each trainer.save_freq-th step and of the last, and
`_load_checkpoint` before the first. Rows checkpoint.save and checkpoint.load of the patch table replace them:

    save    makes global_step_N; workers copy their parts to the host and return; a thread waits until the files of
            every rank are recorded, writes manifest.json, which completes the checkpoint, and removes the chain's
            oldest checkpoints above trainer.max_actor_ckpt_to_keep
    wait    waits for the files of all ranks before an update
    finish  waits for the checkpoint before the next save, and at the end of the run
    load    reads the checkpoint that the launcher found (run/run_start.py) or that trainer.resume_from_path names;
            without it, trainer.resume_mode=auto finds the newest complete one in trainer.default_local_dir

A start by the launcher writes to its own folder; its chain of earlier starts tells which checkpoints belong to the
run (weights/run_folders.py). All nodes must see the folder.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from verl_patches.errors import ConfigError, RecipeError, our_command
from verl_patches.layout.inventory import read_model_shape, size_differences
from verl_patches.layout.model_folder import read_json_object, read_stored_config, without_fp8_and_mtp
from verl_patches.model.megatron import DTYPES
from verl_patches.patching import engine
from verl_patches.shared_files import free_bytes, sync
from verl_patches.spec import RUN, RunSpec, run_from_config
from verl_patches.values import leaves, size_text
from verl_patches.weights.checkpoint_files import (
    CheckpointError,
    decode_generator,
    encode_generator,
    generator_states,
    set_generator_states,
)
from verl_patches.weights.manifest import (
    CRITIC,
    MANIFEST,
    TRAINER_PREFIX,
    Manifest,
    has_manifest,
    rank_file_names,
    read_manifest,
    small_files,
)
from verl_patches.weights.run_folders import (
    CheckpointChain,
    Link,
    checkpoint_chain,
    checkpoints_home,
    complete_checkpoints,
    data_facts,
    folder_bytes,
    path_to_resume,
    read_start,
    remove_checkpoint,
    require_same_data,
    require_steps_left,
)
from verl_patches.weights.writer import complete_folder, write_bytes

log = logging.getLogger(__name__)

STATE_FILE, _EARLIER_FILE = f"{TRAINER_PREFIX}json", f"{TRAINER_PREFIX}safetensors"
_POLL_S = 0.1, 5.0  # seconds between looks for all ranks' files (from, to)
_SAID_S = 60.0  # between lines about a checkpoint that the run waits for; recipe.timeouts.quiet_s needs output
_WAIT_SHARE = 0.6  # must be below launch/supervise/stall.py's WAIT_SHARE
# keys of recipe that do not change the result of a step
_UNCOMPARED_KEYS = ("run", "start", "output_root", "timeouts", "ray_address", "memory", "resume_other_data")


class Checkpoints:
    """Save and load the checkpoints of one run of verl's `trainer`."""

    def __init__(self, trainer: Any, say: Callable[..., None]):
        """Take `say`: say(text) shows a line; say(text, step) also records `step` as the one that is resumed from."""
        config = trainer.config
        self._say, self.trainer, self.config = say, trainer, config
        self.run = run_from_config(config)
        self.chain = run_checkpoints(self.run)
        self.folder = self.chain.links[-1].folder
        self.trains_actor = self.run.trains_actor  # if False, only the critic is saved
        self.max_to_keep = config.trainer.get("max_actor_ckpt_to_keep", None)
        if config.trainer.get("default_hdfs_dir"):  # with the launcher trainer/checks.py refuses it before the start
            text = "trainer.default_hdfs_dir is set, expected null: files go to trainer.default_local_dir only"
            raise ConfigError(text)
        self.records: list[dict[str, Any]] = []  # one for each complete checkpoint: step, bytes, seconds
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._aborted, self._awaited = threading.Event(), False

    # ---- save

    def save(self) -> None:
        """Start a checkpoint of the present step; return once every worker has copied its part to the host."""
        self.finish()
        started, step = time.perf_counter(), self.trainer.global_steps
        writing = self.folder / f"global_step_{step}"
        of_model, groups = self._model_files(), {}
        own = {writing: {**of_model, **self._trainer_files()}}
        ranks, facts, answers = rank_file_names(self.run.world_size), {}, []
        manifests = {}
        if self.trains_actor:
            groups[writing] = self.trainer.actor_rollout_wg
        if self.critic is not None:
            own[writing / CRITIC] = of_model
            groups[writing / CRITIC] = self.critic
            manifests[writing / CRITIC] = critic = self._manifest(step, [*ranks, *of_model], {})
            facts = {CRITIC: critic.identity}
        names = [*(ranks if self.trains_actor else ()), *own[writing]]
        manifests[writing] = self._manifest(step, names, facts)  # written last, as it completes the checkpoint
        self._make_folders(writing, own)
        for folder, group in groups.items():
            answers += group.save_checkpoint(str(folder), None, step)
        record = {"step": step, "blocking_s": time.perf_counter() - started}
        record["copied_bytes"] = max(answer["copied_bytes"] for answer in answers)
        record["copy_s"] = max(answer["seconds"] for answer in answers)
        args = (writing, own, manifests, record, started)
        self._thread = threading.Thread(target=self._complete, args=args, name="checkpoint")
        self._thread.start()

    def _make_folders(self, writing: Path, folders: Iterable[Path]) -> None:
        """Make the folders of a checkpoint, after removing an incomplete one of the same step.

        Raise CheckpointError where the disk has no space for it, before anything is written.
        """
        if writing.is_dir() and not has_manifest(writing):
            remove_checkpoint(writing)
        if free_bytes(writing) < (need := sum(self.run.checkpoint_bytes)):
            with suppress(OSError):
                self.chain.remove_oldest(None, writing)  # what killed saves left
        if (free := free_bytes(writing)) < need:
            raise CheckpointError(
                f"{writing}: expected {size_text(need)} free for a checkpoint (modelled), found {size_text(free)}; "
                "nothing was written. Free some, or change trainer.default_local_dir or trainer.max_actor_ckpt_to_keep "
                f"(now {self.max_to_keep}; the oldest is removed once the new one is complete)"
            )
        for folder in folders:
            folder.mkdir(parents=True)
        sync(writing.parent)

    @property
    def _kl_controller(self) -> Any:
        """Return verl's KL controller if its coefficient adapts from step to step, else None."""
        adapts = self.config.algorithm.use_kl_in_reward and self.config.algorithm.kl_ctrl.type == "adaptive"
        return self.trainer.kl_ctrl_in_reward if adapts else None

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """Return facts about the training data files."""
        return data_facts(self.config.data.train_files)

    @property
    def critic(self) -> Any:
        """Return the critic's worker group; None in a run without one."""
        return self.trainer.critic_wg if getattr(self.trainer, "use_critic", False) else None

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raise the error of a worker or of the completing thread."""
        if self._thread is None:
            return
        self._wait_for_ranks()
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise CheckpointError(f"checkpoint: {self._error}") from self._error

    def wait_before_update(self) -> None:
        """Wait for all ranks' files before an update, in which ranks wait for each other in HCCL with a timeout."""
        if self._thread is not None and self._thread.is_alive():
            self._wait_for_ranks()

    def _wait_for_ranks(self) -> None:
        self._awaited = True
        try:
            self.trainer.actor_rollout_wg.finish_checkpoint()
            if self.critic is not None:
                self.critic.finish_checkpoint()
        except Exception as error:  # of any type: then no rank completes the checkpoint, so the end does not wait
            raise CheckpointError(f"checkpoint: {getattr(error, 'cause', error)}") from error
        self._awaited = False

    def abort_save(self, wait: bool) -> None:
        """End a checkpoint in progress after an error of the run; with `wait`, give it time to become complete.

        It waits at most _WAIT_SHARE of the watch's lowest bound. Beyond that bound the watch takes the controller, or
        ranks that wait for a failed one, for stalled.
        """
        if self._thread is None:
            return
        if wait and self._thread.is_alive():
            self._try_to_say("the run has failed; waiting for its checkpoint in progress")
            recipe, self._awaited = self.config.recipe, True
            bound_s = min(recipe.watch.least_s, 60 * recipe.train.distributed_timeout_minutes)
            self._thread.join(_WAIT_SHARE * bound_s)
        self._aborted.set()
        self._thread.join()

    def _try_to_say(self, text: str) -> None:
        with suppress(RecipeError):  # the disk of the run's folder may be full while that of its checkpoints is not
            self._say(text)

    def _complete(
        self,
        writing: Path,
        own: dict[Path, dict[str, bytes]],
        manifests: dict[Path, Manifest],
        record: dict[str, Any],
        started: float,
    ) -> None:
        """Write the trainer's own files, and each manifest once every rank has written; then remove old checkpoints."""
        try:
            size, said = 0, started
            for folder, manifest in manifests.items():
                for name, content in own[folder].items():
                    write_bytes(folder, name, content)
                while (whole := complete_folder(folder, manifest)) is None:
                    now = time.perf_counter()
                    waited = now - started
                    if self._awaited and now - said > _SAID_S:
                        said = now
                        written = size_text(folder_bytes(writing))
                        self._try_to_say(f"the run waits for its checkpoint in progress, {written} written")
                    if self._aborted.wait(min(_POLL_S[1], max(_POLL_S[0], waited / 20))):
                        return
                size += whole.size_bytes
            self.records.append({**record, "bytes": size, "complete_s": time.perf_counter() - started})
        except Exception as error:
            self._error = error
            return
        try:
            self.chain.remove_oldest(self.max_to_keep, writing)
        except OSError as error:  # the new checkpoint is complete, so this is no error of the run
            self._try_to_say(f"an old checkpoint of {self.folder} cannot be removed and stays there: {error}")

    def _manifest(self, step: int, files: list[str], facts: dict[str, Any]) -> Manifest:
        layout, dtype = str(self.run.train), self.run.recipe.dtype
        facts = {**facts, "step": step, "run": self.run.recipe.run, "start": self.run.start.name, "line": self.run.line}
        facts |= {"steps_per_epoch": len(self.trainer.train_dataloader), "data": self.data}
        facts |= comparable_settings(self.config)
        return Manifest(self._model(), layout, dtype, secrets.token_hex(16), tuple(files), facts=facts)

    def _config(self) -> dict[str, Any]:
        """Return config.json of the trained model: with its dtype, without the quantization of the folder's weights."""
        from verl.utils.fs import copy_to_local

        model = self.config.actor_rollout_ref.model
        stored = read_stored_config(copy_to_local(model.path))
        config = {**without_fp8_and_mtp(stored), **model.get("override_config", {}).get("model_config", {})}
        return {**config, "torch_dtype": str(DTYPES[self.config.recipe.dtype]).removeprefix("torch.")}

    def _model(self) -> Any:
        return read_model_shape(self._config())

    def _model_files(self) -> dict[str, bytes]:
        """Return {name: content} of config.json and the model folder's small files (tokenizer etc.), for an export."""
        from verl.utils.fs import copy_to_local

        folder = Path(copy_to_local(self.config.actor_rollout_ref.model.path))
        contents = {path.name: path.read_bytes() for path in small_files(folder)}
        return {**contents, "config.json": json.dumps(self._config(), indent=2).encode()}

    def _trainer_files(self) -> dict[str, bytes]:
        """Return the file of data position, generators and adaptive KL coefficient."""
        state = {"dataloader": loader_state(self.trainer.train_dataloader), "generators": generator_states()}
        state["kl_coef"] = None if self._kl_controller is None else self._kl_controller.value
        return {STATE_FILE: json.dumps(state).encode()}

    # ---- load

    def load(self) -> None:
        """Resume as trainer.resume_mode says; raise ConfigError or CheckpointError if that is impossible.

        Raise ConfigError too if the run would save over checkpoints that it does not continue, or if the state of its
        data cannot be stored in a checkpoint.
        """
        _use_resumable_sampler(self.trainer.train_dataloader)
        mode = self.config.trainer.resume_mode
        folder = self.chain.newest() if mode == "auto" else None
        folder = folder or path_to_resume(mode, self.config.trainer.resume_from_path)
        saves = self.config.trainer.save_freq > 0
        if folder is not None:
            manifest = read_manifest(folder)
            if saves:
                here = folder.resolve().parent == self.folder.resolve()
                self._refuse_later_checkpoints(manifest.facts["step"] if here else 0)
            self._load(folder, manifest)
            return
        if mode == "auto":
            self._say(f"trainer.resume_mode=auto: no complete checkpoint in {self.folder}, starting from step 1")
        if saves:
            self._refuse_later_checkpoints(0)
            loader_state(self.trainer.train_dataloader)

    def _refuse_later_checkpoints(self, begun: int) -> None:
        """Raise ConfigError if the folder holds checkpoints of steps after `begun`; a start's own folder holds none."""
        if later := sorted(step for step, _ in complete_checkpoints(self.folder) if step > begun):
            raise ConfigError(
                f"trainer.default_local_dir is {self.folder}, which holds global_step_{later[0]} of another run; "
                f"expected none after step {begun}, as this run would save over it: give another folder, move it away, "
                "or continue from the newest with trainer.resume_mode=auto"
            )

    def _load(self, folder: Path, manifest: Manifest) -> None:
        self._check_resumable(folder, manifest)
        step = manifest.facts["step"]
        try:
            if self.trains_actor:
                self.trainer.actor_rollout_wg.load_checkpoint(str(folder), None, False)
            if self.critic is not None:
                self.critic.load_checkpoint(str(folder / CRITIC), None, False)
        except CheckpointError as error:  # Ray's error of a worker is of this type too, with the original as `cause`
            if folder not in self.chain.checkpoints().values():
                raise
            raise CheckpointError(f"{getattr(error, 'cause', error)}\n{self.chain.fallback_text(folder)}") from error
        state = read_json_object(folder / STATE_FILE)
        self.trainer.train_dataloader.load_state_dict(state["dataloader"])
        loader_state(self.trainer.train_dataloader)  # makes the loader's iterator, which draws a seed
        set_generator_states(state["generators"])
        if self._kl_controller and state.get("kl_coef"):
            self._kl_controller.value = state["kl_coef"]
        self.trainer.global_steps = step
        self._say(f"resumed from {folder}: step {step} is complete", step)

    def _check_resumable(self, folder: Path, manifest: Manifest) -> None:
        """Raise ConfigError if the checkpoint is of another model, line or data, or if no step is left to run."""
        recipe, faults = self.config.recipe, []
        if unlike := size_differences(manifest.model, self._model()):
            faults.append(f"its model differs from this run's: {unlike}")
        if manifest.facts.get("line", recipe.line) != recipe.line:
            faults.append(f"it was saved by a run of recipe.line={manifest.facts['line']}, expected {recipe.line}")
        if (folder / _EARLIER_FILE).is_file():
            command = our_command("weights", "export", str(folder), "DIR")
            faults.append(
                f"an earlier version saved it: expected no {_EARLIER_FILE}, as this version does not read the data "
                f"position in it; export its weights with `{command}` and start from them"
            )
        elif not (folder / STATE_FILE).is_file():
            faults.append(f"it has no {STATE_FILE}")
        critic = manifest.facts.get(CRITIC)
        if critic is not None and read_manifest(folder / CRITIC).identity != critic:
            faults.append(f"{CRITIC}/{MANIFEST} belongs to another checkpoint")
        if (critic is not None) != (self.critic is not None):
            faults.append("it has no critic, expected one" if critic is None else "it has a critic, this run has none")
        if faults:
            raise ConfigError(f"cannot resume from {folder}: {'; '.join(faults)}")
        step, total = manifest.facts["step"], self.trainer.total_training_steps
        require_steps_left(folder, step, total, "trainer.total_training_steps")
        require_same_data(folder, manifest, self.data, recipe.resume_other_data)
        now = comparable_settings(self.config)
        changed = setting_changes(manifest.facts["settings"], now["settings"])
        if manifest.facts["patches"] != now["patches"]:
            changed.append("other patches")
        if changed:
            log.warning("the configuration differs from that of %s: %s", folder, "; ".join(changed))


def run_checkpoints(run: RunSpec) -> CheckpointChain:
    """Return the checkpoints that belong to the run; for a start by the launcher, those of its chain of starts."""
    saved = Path(run.verl.trainer.default_local_dir).absolute()
    if run.start.by_launcher:
        assert run.start.name is not None  # the launcher sets both
        home = checkpoints_home(run.home, str(saved))
        if start := read_start(home / run.start.name):
            return checkpoint_chain(start)
    return CheckpointChain((Link(saved),))


def comparable_settings(config: Any) -> dict[str, Any]:
    """Return {patches, settings}, which a resumed run is compared with."""
    resolved = OmegaConf.to_container(config, resolve=True)
    names = [
        "recipe",
        "actor_rollout_ref",
        "algorithm",
        "data",
        *(["critic"] if run_from_config(config).has_critic else []),
    ]
    sections = {name: resolved[name] for name in names}
    sections["recipe"] = {k: v for k, v in resolved["recipe"].items() if k not in _UNCOMPARED_KEYS}
    mirrored = (f"actor_rollout_ref.{RUN}", f"critic.{RUN}")
    settings = {k: v for k, v in leaves(sections) if v != {} and not k.startswith(mirrored)}
    return {"patches": engine.current_engine().digest(), "settings": settings}


def setting_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a text for each setting that differs."""
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return [f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys]


# ---- the state of the data


class RandomSampler(torch.utils.data.RandomSampler):
    """Draw like torch's RandomSampler, with a state: the generator's at the start of a pass, and the samples drawn.

    torch's sampler has no state: a run resumed in a later pass over the data would repeat the order of the first one.
    torchdata's sampler draws orders that it does not use if the loader has workers.
    """

    _start_state: str | None = None  # of the generator at the last pass's start; None: go on after `_drawn_samples`
    _drawn_samples = 0

    def __iter__(self) -> Iterator[int]:
        skip = self._drawn_samples if self._start_state is None else 0
        self._start_state, self._drawn_samples = encode_generator(self.generator.get_state()), skip
        for index in itertools.islice(super().__iter__(), skip, None):
            self._drawn_samples += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        """Return {generator: its state at the start of the pass, text; drawn: samples drawn in that pass}."""
        begun = self._start_state or encode_generator(self.generator.get_state())
        return {"generator": begun, "drawn": self._drawn_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue where `state_dict` was taken; if that pass was complete, begin a new one."""
        self.generator.set_state(decode_generator(state["generator"]))
        self._start_state, self._drawn_samples = None, state["drawn"]
        if self._drawn_samples == len(self):  # drawing the complete pass again brings the generator to its end
            collections.deque(super().__iter__(), 0)
            self._drawn_samples = 0


def _use_resumable_sampler(loader: Any) -> None:
    """Replace verl's random sampler by one with a state."""
    batches = loader.batch_sampler
    if type(batches.sampler) is torch.utils.data.RandomSampler and batches.sampler.generator is not None:
        batches.sampler = RandomSampler(batches.sampler.data_source, generator=batches.sampler.generator)


def loader_state(loader: Any) -> Any:
    """Return the state of loader and sampler; raise ConfigError if it is not JSON: reading a pickle would run code."""
    state = loader.state_dict()
    try:
        fault = "" if json.loads(json.dumps(state)) == state else "values change when they are read from JSON"
    except TypeError as error:
        fault = str(error)
    if fault:
        raise ConfigError(
            f"checkpoint: state_dict() of the data loader: {fault}; expected JSON values (dict with text keys, list, "
            "text, number, bool, None). Change the sampler or data set that returns it, or set trainer.save_freq=-1"
        )
    return state


def save_as_recipe(original: Callable) -> Callable:
    """Replace RayPPOTrainer._save_checkpoint with Checkpoints.save."""
    return _call_checkpoints(original, Checkpoints.save)


def load_as_recipe(original: Callable) -> Callable:
    """Replace RayPPOTrainer._load_checkpoint with Checkpoints.load."""
    return _call_checkpoints(original, Checkpoints.load)


def _call_checkpoints(original: Callable, ours: Callable[[Checkpoints], None]) -> Callable:
    @functools.wraps(original)
    def call(trainer: Any) -> Any:
        checkpoints = getattr(trainer, "recipe_checkpoints", None)  # absent if row checkpoint.save is off
        return original(trainer) if checkpoints is None else ours(checkpoints)

    return call
