"""What `generate`, `chat` and `eval` run: the weights that a user names, the configuration they belong to, sampling.

Weights are read where they are, in any format of weights/source.py: a HF folder, shards, or a checkpoint of a run. The
settings of a run's checkpoint are those of its config.yaml; of other weights, those of a file of configs/.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_patches.config.compose import compose
from verl_patches.config.environment import COMPOSED, derive, process_environment
from verl_patches.config.run_start import checkpoints_of
from verl_patches.errors import ConfigError
from verl_patches.evaluation.record import find_run
from verl_patches.layout.inventory import SCORE
from verl_patches.platform import require as require_platform
from verl_patches.rewards.parts import parts_of
from verl_patches.trainer.record import run_id
from verl_patches.upstream.checkouts import Trees, for_platform, require_trees, require_verl
from verl_patches.weights.checkpoint_folders import saved_in
from verl_patches.weights.manifest import SAVED
from verl_patches.weights.source import Source, open_source
from verl_patches.yaml_files import read_yaml


@dataclass(frozen=True)
class Model:
    """Weights and settings. sources: by step of the run, oldest first; by 0 those of no run."""

    config: DictConfig
    trees: Trees
    sources: dict[int, Source]

    @property
    def longest(self) -> int:
        """The model's length in tokens, prompt and response."""
        return next(iter(self.sources.values())).config["max_position_embeddings"]


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled, by vLLM's names; temperature 0 is greedy. max_tokens: of a response."""

    n: int = 1
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    ignore_eos: bool = False

    def check(self) -> Sampling:
        """Itself; ConfigError for values that vLLM refuses, or that give equal responses."""
        bounds = {
            "n": (self.n >= 1, "a whole number >= 1"),
            "seed": (0 <= self.seed < 2**32, "a whole number from 0, below 2^32"),
            "temperature": (0 <= self.temperature <= 100, "a number from 0 to 100"),
            "top_p": (0 < self.top_p <= 1, "a number above 0, at most 1"),
            "top_k": (self.top_k == -1 or self.top_k >= 1, "-1 (all), or a whole number >= 1"),
            "max_tokens": (self.max_tokens >= 1, "a whole number >= 1"),
        }
        for name, (fits, expected) in bounds.items():
            if not fits:
                raise ConfigError(f"sampling: {name} is {getattr(self, name)}; expected {expected}")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"sampling: n is {self.n} with temperature 0, whose responses are equal; expected n=1")
        return self


def validation_sampling(config: DictConfig) -> Sampling:
    """How the trainer of `config` samples in a validation (verl's rollout.val_kwargs)."""
    rollout, given = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    kept = {"seed": rollout.get("seed") or 0, "max_tokens": config.data.max_response_length, "n": given.n}
    kept["ignore_eos"] = rollout.ignore_eos
    if not given.do_sample:
        return Sampling(**kept, temperature=0.0)
    return Sampling(**kept, temperature=given.temperature, top_p=given.top_p, top_k=given.top_k)


def find_model(
    given: Path, root: Path, config_name: str, overrides: Sequence[str], trees: Trees, step: int | None = None
) -> Model:
    """The weights of a folder, or all checkpoints of the run `given`, below `root` or a path; `step`: that one.

    Headers are read and checked. ConfigError for what is neither, for a value model, and for a platform or line that
    cannot run here.
    """
    is_weights = (given / "config.json").exists()
    run = given.absolute().parents[1] if is_weights else find_run(given, root)
    if is_weights and not (SAVED.fullmatch(given.name) and (run / COMPOSED).is_file()):
        run = None
    config = compose(config_name, overrides, verl_path=trees.verl) if run is None else _of_run(run, overrides)
    folders = {int(found[1]) if (found := SAVED.fullmatch(given.name)) else 0: given}
    if not is_weights:
        folders = saved_in(checkpoints_of(config), run_id(run)).own
        if not folders:
            raise ConfigError(
                f"{run}: expected checkpoints of this run in {checkpoints_of(config)}, found none; a run with "
                "trainer.save_freq=N writes them"
            )
    if step is not None and step not in folders:
        raise ConfigError(f"--step {step}: expected one of {', '.join(map(str, folders))}, the checkpoints of {given}")
    _require_engine(config, trees)
    chosen = folders if step is None else {step: folders[step]}
    sources = {number: _source(folder) for number, folder in chosen.items()}
    return Model(config, for_platform(config.recipe.platform, trees), sources)


def _of_run(run: Path, overrides: Sequence[str]) -> DictConfig:
    """The composed configuration of a run, with `overrides` of keys that it has."""
    config = OmegaConf.create(read_yaml(run / COMPOSED))
    OmegaConf.set_struct(config, True)
    for word in overrides:
        if "=" not in word or word.startswith(("+", "~")):
            raise ConfigError(f"override {word!r}: expected key=value, such as data.max_response_length=512")
        try:
            config.merge_with_dotlist([word])
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            raise ConfigError(f"override {word!r} of {run / COMPOSED}: {str(error).splitlines()[0]}") from None
    try:
        parts_of(config)
        checkpoints_of(config)
        _ = config.recipe.line, config.recipe.platform, config.actor_rollout_ref.rollout.val_kwargs
    except (OmegaConfBaseException, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{run / COMPOSED}: expected the configuration of a run of this version, found: "
            f"{str(error).splitlines()[0]}"
        ) from None
    return config


def _require_engine(config: DictConfig, trees: Trees) -> None:
    platform = config.recipe.platform
    if platform == "npu":
        raise ConfigError(
            "generate, chat and eval start one engine in this process, and engines over several dies or nodes, which "
            "platform npu needs for DeepSeek-V3, are not there yet: serve the folder of `weights export` with vllm, or "
            "validate in a run (trainer.val_before_train=true, trainer.total_training_steps=1)"
        )
    require_trees(config, trees)
    require_verl(config.recipe.line, trees)
    require_platform(platform)


def _source(folder: Path) -> Source:
    source = open_source(folder)
    if SCORE in source.tensors:
        raise ConfigError(f"{folder}: holds a value model ({SCORE}), expected one with a head for tokens")
    longest = source.config.get("max_position_embeddings")
    if type(longest) is not int or longest < 1:
        raise ConfigError(f"{folder / 'config.json'}: max_position_embeddings is {longest!r:.80}; expected a number")
    return source


def restart_in_environment(model: Model) -> None:
    """Start this command again with the variables of a run of the configuration, unless it has them.

    Some are read when Python or torch starts. Nothing was written yet.
    """
    given = [v for v in derive(model.config, trees=model.trees) if v.where == "workers" or v.name == "PYTHONPATH"]
    if any(os.environ.get(variable.name) != variable.value for variable in given):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], process_environment(given, os.environ))
