"""Checkpoints of a run, in the trainer's process: order, completion, retention and resume.

verl's trainer calls `_save_checkpoint` after the update of each trainer.save_freq-th step and of the last, and
`_load_checkpoint` before the first. Rows checkpoint.save and checkpoint.load put these in their place:

    save    global_step_N is made; workers copy to the host and return; a thread waits until every rank's files are
            recorded, writes manifest.json, which makes it a checkpoint, and removes the chain's oldest above
            trainer.max_actor_ckpt_to_keep
    wait    before an update, for all ranks' files
    finish  before the next save, and at the end of the run
    load    the checkpoint that the launcher found (run/run_start.py) or trainer.resume_from_path names; without the
            launcher trainer.resume_mode=auto is the newest complete one in trainer.default_local_dir

A start of the launcher writes to its own folder, and its chain decides what belongs to the run
(weights/run_folders.py). All nodes must see the folder.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import json
import logging
import operator
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from omegaconf import OmegaConf

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import differences, read_model_shape
from verl_patches.layout.model_folder import QUANTIZATION, read_json_object
from verl_patches.model.megatron import DTYPES
from verl_patches.patching import engine
from verl_patches.shared_files import sync
from verl_patches.spec import RUN, RunSpec, run_of
from verl_patches.values import leaves, size_text
from verl_patches.weights.checkpoint_files import CheckpointError, generators, set_generators
from verl_patches.weights.manifest import (
    CRITIC,
    MANIFEST,
    OF_TRAINER,
    Manifest,
    has_manifest,
    rank_files,
    read_manifest,
    small_files,
)
from verl_patches.weights.reader import DTYPES as STORED
from verl_patches.weights.run_folders import (
    Chain,
    Link,
    chain_of_start,
    checkpoints_home,
    complete_in,
    data_facts,
    path_to_resume,
    read_start,
    remove,
    require_same_data,
    require_steps_left,
    size_bytes,
)
from verl_patches.weights.writer import complete_as, write_bytes

log = logging.getLogger(__name__)

STATE, TENSORS = f"{OF_TRAINER}json", f"{OF_TRAINER}safetensors"
_POLL_S, _GRACE_S = (0.1, 5.0), 30.0
_WAIT_SHARE = 0.6  # below launch/supervise/stall.py's WAIT_SHARE
# keys of recipe that change no step
_NOT_COMPARED = ("run", "start", "output_root", "timeouts", "ray_address", "ray_port", "memory", "resume_other_data")


class Checkpoints:
    """The checkpoints of one run of verl's `trainer`."""

    def __init__(self, trainer: Any, say: Callable[..., None]):
        """say(text) shows a line; say(text, step) one about the step that the run goes on after."""
        config = trainer.config
        self._say, self.trainer, self.config = say, trainer, config
        self.run = run_of(config)
        self.chain = chain_in(self.run)
        self.folder = self.chain.links[-1].folder
        self.trains_actor = self.run.trains_actor  # else the critic is all that is saved
        self.keep = config.trainer.get("max_actor_ckpt_to_keep", None)
        self.records: list[dict[str, Any]] = []  # of complete ones: step, bytes, seconds
        self._data: dict[str, Any] | None = None
        self._thread: threading.Thread | None = None
        self._folder_in_writing: Path | None = None
        self._error: Exception | None = None
        self._not_removed: list[str] = []
        self._given_up = threading.Event()

    # ---- save

    def save(self) -> None:
        """Start a checkpoint of the present step; returns once every worker has copied its part to the host."""
        self._refuse()
        self.finish()
        started, step = time.perf_counter(), self.trainer.global_steps
        writing = self.folder / f"global_step_{step}"
        of_model, groups = self._model_files(), {}
        own = {writing: {**of_model, **self._trainer_files()}}
        ranks, facts, answers = rank_files(self.run.world_size), {}, []
        manifests = {}
        if self.trains_actor:
            groups[writing] = self.trainer.actor_rollout_wg
        if self.critic is not None:
            own[writing / CRITIC] = of_model
            groups[writing / CRITIC] = self.critic
            manifests[writing / CRITIC] = critic = self._manifest(step, [*ranks, *of_model], {})
            facts = {CRITIC: critic.identity}
        names = [*(ranks if self.trains_actor else ()), *own[writing]]
        manifests[writing] = self._manifest(step, names, facts)  # the last one: it makes the whole complete
        self._make_folders(writing, own)
        for folder, group in groups.items():
            answers += group.save_checkpoint(str(folder), None, step)
        record = {"step": step, "blocking_s": time.perf_counter() - started}
        record["copied_bytes"] = max(answer["copied_bytes"] for answer in answers)
        record["copy_s"] = max(answer["seconds"] for answer in answers)
        self._folder_in_writing = writing
        args = (writing, own, manifests, record, started)
        self._thread = threading.Thread(target=self._complete, args=args, name="checkpoint")
        self._thread.start()

    @staticmethod
    def _make_folders(writing: Path, folders: Iterable[Path]) -> None:
        """Make the folders of a checkpoint; what a killed save of that step left is removed first."""
        if writing.is_dir() and not has_manifest(writing):
            remove(writing)
        for folder in folders:
            folder.mkdir(parents=True)
        sync(writing.parent)

    @property
    def _kl(self) -> Any:
        """verl's KL coefficient where it adapts from step to step, else None."""
        adapts = self.config.algorithm.use_kl_in_reward and self.config.algorithm.kl_ctrl.type == "adaptive"
        return self.trainer.kl_ctrl_in_reward if adapts else None

    @property
    def data(self) -> dict[str, Any]:
        """What data the run trains on, read once."""
        if self._data is None:
            self._data = data_facts(self.config.data.train_files)
        return self._data

    @property
    def critic(self) -> Any:
        """The critic's worker group; None in a run without one."""
        return self.trainer.critic_wg if getattr(self.trainer, "use_critic", False) else None

    def _refuse(self) -> None:
        """ConfigError for what would be left out; trainer/checks.py says so before the start, with the launcher."""
        if self.config.trainer.get("default_hdfs_dir"):
            raise ConfigError("checkpoint: trainer.default_hdfs_dir is set, expected null; default_local_dir is used")

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raises what a worker or the completing thread raised."""
        if self._thread is None:
            return
        self._wait_for_ranks()
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise CheckpointError(f"checkpoint: {self._error}") from self._error
        while self._not_removed:
            self._say(self._not_removed.pop())

    def wait_before_update(self) -> None:
        """Wait for all ranks' files: inside an update, ranks wait for each other in HCCL, which ends them in time."""
        if self._thread is not None and self._thread.is_alive():
            self._wait_for_ranks()

    def _wait_for_ranks(self) -> None:
        self.trainer.actor_rollout_wg.finish_checkpoint()
        if self.critic is not None:
            self.critic.finish_checkpoint()

    def give_up(self, wait: bool) -> None:
        """After an error of the run: end a checkpoint in progress, with `wait` only once its files grow no more.

        For _WAIT_SHARE of the least bound of the watch at most, which takes the controller, or ranks that wait for one
        that has failed, for stalled past it.
        """
        if self._thread is None:
            return
        assert self._folder_in_writing is not None  # `save` sets it before the thread
        before, written = None, size_bytes(self._folder_in_writing)
        recipe = self.config.recipe
        bound_s = min(recipe.watch.least_s, 60 * recipe.train.collective_timeout_minutes)
        ends = time.monotonic() + _WAIT_SHARE * bound_s
        while wait and self._thread.is_alive() and written != before and time.monotonic() < ends:
            with suppress(RecipeError):  # the disk of the run's folder may be full, that of its checkpoints not
                self._say(f"the run has failed; its checkpoint in progress is waited for, {size_text(written)} written")
            self._thread.join(min(_GRACE_S, ends - time.monotonic()))
            before, written = written, size_bytes(self._folder_in_writing)
        self._given_up.set()
        self._thread.join()

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
            size = 0
            for folder, manifest in manifests.items():
                for name, content in own[folder].items():
                    write_bytes(folder, name, content)
                while (whole := complete_as(folder, manifest)) is None:
                    waited = time.perf_counter() - started
                    if self._given_up.wait(min(_POLL_S[1], max(_POLL_S[0], waited / 20))):
                        return
                size += whole.size_bytes
            self.records.append({**record, "bytes": size, "complete_s": time.perf_counter() - started})
        except Exception as error:
            self._error = error
            return
        try:
            self.chain.remove_oldest(self.keep, writing)
        except OSError as error:  # the new one is whole
            self._not_removed.append(f"{self.folder}: an old checkpoint cannot be removed ({error}); left there")

    def _manifest(self, step: int, files: list[str], facts: dict[str, Any]) -> Manifest:
        layout, dtype = str(self.run.train), self.run.recipe.dtype
        facts = {**facts, "step": step, "run": self.run.recipe.run, "start": self.run.start.name, "line": self.run.line}
        facts |= {"steps_per_epoch": len(self.trainer.train_dataloader), "data": self.data, **settings_of(self.config)}
        return Manifest(self._model(), layout, dtype, secrets.token_hex(16), tuple(files), facts=facts)

    def _config(self) -> dict[str, Any]:
        """config.json of the model as it is trained: its dtype, and nothing of how the folder stores weights."""
        from verl_patches.model.mindspeed.start import read_hf_config

        config = {k: v for k, v in read_hf_config(self.config.actor_rollout_ref).items() if k != QUANTIZATION}
        return {**config, "torch_dtype": str(DTYPES[self.config.recipe.dtype]).removeprefix("torch.")}

    def _model(self) -> Any:
        return read_model_shape(self._config())

    def _model_files(self) -> dict[str, bytes]:
        """config.json, and the tokenizer and the like of the model's folder, which an export needs."""
        from verl.utils.fs import copy_to_local

        folder = Path(copy_to_local(self.config.actor_rollout_ref.model.path))
        contents = {path.name: path.read_bytes() for path in small_files(folder)}
        return {**contents, "config.json": json.dumps(self._config(), indent=2).encode()}

    def _trainer_files(self) -> dict[str, bytes]:
        """Position in the data and generators: JSON with null in place of tensors, and these by their path."""
        state, tensors = data_state(self.trainer.train_dataloader)
        text = json.dumps({"dataloader": state, "generators": generators(), "kl_coef": self._kl and self._kl.value})
        return {STATE: text.encode(), TENSORS: safetensors.torch.save(tensors)}

    # ---- load

    def load(self) -> None:
        """Resume as trainer.resume_mode says; ConfigError or CheckpointError where it cannot.

        ConfigError too where the run would save over checkpoints that it does not go on from, and where it will save a
        state of the data that no checkpoint can hold.
        """
        mode = self.config.trainer.resume_mode
        folder = self.chain.newest() if mode == "auto" else None
        folder = folder or path_to_resume(mode, self.config.trainer.resume_from_path)
        saves = self.config.trainer.save_freq > 0
        if folder is not None:
            manifest = read_manifest(folder)
            if saves:
                here = folder.resolve().parent == self.folder.resolve()
                self._refuse_to_mix(manifest.facts["step"] if here else 0)
            self._load(folder, manifest)
            return
        if mode == "auto":
            self._say(f"trainer.resume_mode=auto: no complete checkpoint in {self.folder}, starting from step 1")
        if saves:
            self._refuse_to_mix(0)
        _keep_generator(self.trainer.train_dataloader)
        if saves:
            data_state(self.trainer.train_dataloader)

    def _refuse_to_mix(self, begun: int) -> None:
        """ConfigError where the folder has checkpoints of steps after `begun`; that of a start has none."""
        if later := sorted(step for step, _ in complete_in(self.folder) if step > begun):
            raise ConfigError(
                f"trainer.default_local_dir is {self.folder}, which holds global_step_{later[0]} of another run; "
                f"expected none after step {begun}, as this run would save over it: give another folder, move it away, "
                "or go on from the newest with trainer.resume_mode=auto"
            )

    def _load(self, folder: Path, manifest: Manifest) -> None:
        self._refuse()
        self._check(folder, manifest)
        step = manifest.facts["step"]
        try:
            if self.trains_actor:
                self.trainer.actor_rollout_wg.load_checkpoint(str(folder), None, False)
            if self.critic is not None:
                self.critic.load_checkpoint(str(folder / CRITIC), None, False)
        except CheckpointError as error:  # Ray's error of a worker's is of its type too, and has it as `cause`
            if folder not in self.chain.checkpoints().values():
                raise
            raise CheckpointError(f"{getattr(error, 'cause', error)}\n{self.chain.instead_of(folder)}") from error
        state = read_trainer_state(folder)
        if "'sampler_state'" in str(state["dataloader"]):  # else it was saved with torch's sampler
            _keep_generator(self.trainer.train_dataloader)
        self.trainer.train_dataloader.load_state_dict(state["dataloader"])
        data_state(self.trainer.train_dataloader)  # makes its iterator, which draws a seed
        set_generators(state["generators"])
        if self._kl and state.get("kl_coef"):
            self._kl.value = state["kl_coef"]
        self.trainer.global_steps = step
        self._say(f"resumed from {folder}: step {step} is complete", step)

    def _check(self, folder: Path, manifest: Manifest) -> None:
        """ConfigError where the checkpoint is not one of this model, line and data, or leaves no step to make."""
        recipe, faults = self.config.recipe, []
        if unlike := differences(manifest.model, self._model()):
            faults.append(f"it is of another model: {unlike}")
        if manifest.facts.get("line", recipe.line) != recipe.line:
            faults.append(f"it is of line {manifest.facts['line']}, expected {recipe.line}")
        if not (folder / STATE).is_file():
            faults.append(f"it has no {STATE}")
        if (critic := manifest.facts.get(CRITIC)) is not None and read_manifest(folder / CRITIC).identity != critic:
            faults.append(f"{CRITIC}/{MANIFEST} is of another checkpoint")
        if (critic is not None) != (self.critic is not None):
            faults.append("it has no critic" if critic is None else "it has a critic, this run has none")
        if faults:
            raise ConfigError(f"{folder} cannot be resumed from: {'; '.join(faults)}")
        step, total = manifest.facts["step"], self.trainer.total_training_steps
        require_steps_left(folder, step, total, "trainer.total_training_steps")
        require_same_data(folder, manifest, self.data, recipe.resume_other_data)
        now = settings_of(self.config)
        if manifest.facts["digest"] != now["digest"]:
            changed = changes(manifest.facts["settings"], now["settings"])
            log.warning("the recipe is not that of %s: %s", folder, "; ".join(changed) or "other patches")


def chain_in(run: RunSpec) -> Chain:
    """Return the checkpoints that belong to the run: of a start of the launcher its chain's."""
    saved = Path(run.verl.trainer.default_local_dir).absolute()
    if run.start.by_launcher:
        assert run.start.name is not None  # the launcher gives both
        home = checkpoints_home(run.home, str(saved))
        if start := read_start(home / run.start.name):
            return chain_of_start(start)
    return Chain((Link(saved),))


def settings_of(config: Any) -> dict[str, Any]:
    """{digest, settings}: what a resumed run is compared with. The digest is of settings and active patches."""
    resolved = OmegaConf.to_container(config, resolve=True)
    names = ["recipe", "actor_rollout_ref", "algorithm", "data", *(["critic"] if run_of(config).has_critic else [])]
    sections = {name: resolved[name] for name in names}
    sections["recipe"] = {k: v for k, v in resolved["recipe"].items() if k not in _NOT_COMPARED}
    mirrored = (f"actor_rollout_ref.{RUN}", f"critic.{RUN}")
    settings = {k: v for k, v in leaves(sections) if v != {} and not k.startswith(mirrored)}
    patches = engine.current().digest()
    text = json.dumps([settings, patches], sort_keys=True, default=str)
    return {"digest": hashlib.sha256(text.encode()).hexdigest(), "patches": patches, "settings": settings}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Each setting that differs, as text."""
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return [f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys]


# ---- the state of the data


class RandomSampler(torch.utils.data.RandomSampler):
    """torch's, in its order, with a state: the generator's at the start of a pass, and how much of the pass was drawn.

    torch's own has none: a run that is resumed in a later pass over the data would go on in the first one's order.
    torchdata's draws orders that it does not use, where the loader has workers.
    """

    _begun: torch.Tensor | None = None  # of the pass begun last; None: the next one goes on after `_drawn`
    _drawn = 0

    def __iter__(self) -> Iterator[int]:
        skip = self._drawn if self._begun is None else 0
        self._begun, self._drawn = self.generator.get_state(), skip
        for index in itertools.islice(super().__iter__(), skip, None):
            self._drawn += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        """{generator: its state at the start of the pass, uint8; drawn: samples of that pass}."""
        begun = self.generator.get_state() if self._begun is None else self._begun
        return {"generator": begun, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on where `state_dict` was taken; after a pass that was over, a new one begins."""
        self.generator.set_state(state["generator"])
        self._begun, self._drawn = None, state["drawn"]
        if self._drawn == len(self):  # that pass is over
            collections.deque(super().__iter__(), 0)
            self._drawn = 0


def _keep_generator(loader: Any) -> None:
    """verl's random sampler becomes one with a state."""
    batches = loader.batch_sampler
    if type(batches.sampler) is torch.utils.data.RandomSampler and batches.sampler.generator is not None:
        batches.sampler = RandomSampler(batches.sampler.data_source, generator=batches.sampler.generator)


def data_state(loader: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The loader's state, its sampler's included: (JSON with null in place of tensors, {JSON of their path: tensor}).

    ConfigError, with the key, for a value of any other kind: nothing is pickled, as a pickle runs code when it is read.
    """
    tensors: dict[str, torch.Tensor] = {}

    def stored(value: Any, path: list[str | int]) -> Any:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in STORED:
            tensors[json.dumps(path)] = value.detach().cpu().contiguous().clone()
            return None
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: stored(each, [*path, key]) for key, each in value.items()}
        if type(value) is list:
            return [stored(each, [*path, at]) for at, each in enumerate(value)]
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise ConfigError(
            f"checkpoint: state_dict() of the data loader, key {'.'.join(map(str, path)) or '(all)'}: is of type "
            f"{type(value).__name__}; expected tensors or what JSON has (dict with text as keys, list, text, number, "
            "bool, None), also of the sampler and the data set; or set trainer.save_freq=-1"
        )

    return stored(loader.state_dict(), []), tensors


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """{dataloader, generators, kl_coef} of a checkpoint; ConfigError for other content."""
    state = read_json_object(folder / STATE)
    for path, tensor in safetensors.torch.load((folder / TENSORS).read_bytes()).items():
        keys = ["dataloader", *json.loads(path)]
        functools.reduce(operator.getitem, keys[:-1], state)[keys[-1]] = tensor
    return state


def save_as_recipe(original: Callable) -> Callable:
    """Row provider for RayPPOTrainer._save_checkpoint."""
    return _by_run(original, Checkpoints.save)


def load_as_recipe(original: Callable) -> Callable:
    """Row provider for RayPPOTrainer._load_checkpoint."""
    return _by_run(original, Checkpoints.load)


def _by_run(original: Callable, ours: Callable[[Checkpoints], None]) -> Callable:
    @functools.wraps(original)
    def call(trainer: Any) -> Any:
        checkpoints = getattr(trainer, "recipe_checkpoints", None)  # none with row checkpoint.save off
        return original(trainer) if checkpoints is None else ours(checkpoints)

    return call
