"""Define `RunSpec`, the facts of one run, which are resolved once from its configuration and handed on.

run/resolve.py makes it. Commands, plans, rules and the launcher take it, or the values that they need. verl hands a
worker only a section of its configuration: the controller writes the facts there as JSON text (`write_run`), and code
in the controller and in workers reads them back with `run_from_config` instead of deriving them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import AfterValidator, ConfigDict, PlainSerializer, TypeAdapter

from verl_patches.errors import Check, ConfigError, our_command
from verl_patches.layout.inventory import DTYPE_BYTES, ModelShape, build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import OPTIMIZER_BYTES, train_library
from verl_patches.patching.switches import Switches
from verl_patches.platform import as_npu
from verl_patches.platform.npu.machine import HARDWARE, Hardware
from verl_patches.recipe import VLLM_DTYPES, Part, Recipe, Reward

RUN = "run"  # key of verl's configuration, and of its sections that workers get, which holds `RunSpec.text`
A3 = "a3"  # the line of Atlas A3, with MindSpeed
VALUE_OBJECTIVES = ("rm", "prm")  # objectives that train a value model and no actor
_Frozen = Annotated[Mapping[str, Any], PlainSerializer(dict), AfterValidator(MappingProxyType)]
_LAUNCHER_FIELDS = {"verl", "given_keys", "trees", "no_start"}  # fields of RunSpec that `text` leaves out
_DEFAULT_MAX_NUM_SEQS = 256  # vLLM's default of max_num_seqs below 70 GiB a device (vllm.engine.arg_utils.EngineArgs)


@dataclass(frozen=True)
class Trees:
    """List the upstream folders of a run's PYTHONPATH, in order; `verl` is the one with verl's configuration.

    option: the command-line option that named them, for commands that are printed. Without folders a run uses the
    installed packages.
    """

    option: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    verl: Path | None = None


@dataclass(frozen=True)
class NextStart:
    """Describe where a start of a run begins: from a checkpoint, or at step 1.

    resumed, step: the checkpoint that it starts from, and the step after which that was written. parent: the start of
    this run that it continues, and the step; None where it begins a chain. held: number of checkpoints of the chain.
    name: its folder, such as 0001; None before it is made. by_launcher: whether the launcher made it; checkpoints then
    lie in that folder too.
    """

    resumed: Path | None = None
    step: int | None = None
    parent: tuple[str, int] | None = None
    held: int = 0
    name: str | None = None
    by_launcher: bool = False


@dataclass(frozen=True)
class RunSpec:
    """Hold the facts of one run.

    recipe: the typed section `recipe:`. verl: the whole composed configuration, for verl's own keys; empty in workers,
    which have their section from verl. switches: line, platform, and rows that the user switches; rows: ids of the rows
    of the catalogue that are on (features.py).
    model: sizes of the trained model, with its dtype on disk; hf_config: its config.json with the run's changes.
    max_positions: tokens of the longest sequence that the model supports.
    train, rollout: how the model is split over all ranks of the run by Megatron, and by vLLM's instances.
    engine: keyword arguments of vLLM's engine beside those that verl passes. rewards: the parts of the reward.
    has_critic: whether verl's trainer trains a critic. start: where the next start of the run begins; no_start: why it
    cannot start, else empty. given_keys: keys that the command line sets. trees: upstream checkouts to import.
    lowered_from: max_num_seqs of the configuration where the memory plan has lowered it, else None.
    probes: {what the workers of the start measure in place of training, without models: the facts of the run that it is
    measured for, as `text`, or "" for this one} (worker/probe); empty where they train.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # DictConfig

    recipe: Recipe
    switches: Switches
    rows: Annotated[frozenset[str], PlainSerializer(sorted)]
    model: ModelShape
    max_positions: int
    hf_config: _Frozen
    train: ParallelLayout
    rollout: ParallelLayout
    engine: _Frozen
    rewards: tuple[Part, ...]
    has_critic: bool
    start: NextStart = NextStart()
    no_start: str = ""
    verl: DictConfig = field(default_factory=lambda: OmegaConf.create({}, flags={"struct": True}))
    given_keys: frozenset[str] = frozenset()
    trees: Trees = Trees()
    lowered_from: int | None = None
    probes: _Frozen = field(default_factory=lambda: MappingProxyType({}))

    @property
    def line(self) -> str:
        """Return the set of pins: pypi or a3."""
        return self.recipe.line

    @property
    def platform(self) -> str:
        """Return the kind of device: npu, npu_emulated or cpu."""
        return self.recipe.platform

    @property
    def as_npu(self) -> bool:
        """Return whether settings, rules and libraries are those of an NPU, also where one is emulated."""
        return as_npu(self.platform)

    @property
    def hardware(self) -> Hardware:
        """Return the kind of machine with NPUs that the run is for."""
        return HARDWARE[self.recipe.hardware]

    @property
    def torch_dtype(self) -> str:
        """Return the dtype of training and rollout, as torch names it."""
        return VLLM_DTYPES[self.recipe.dtype]

    @property
    def trained_model(self) -> ModelShape:
        """Return the model's sizes, in the dtype of the run."""
        return replace(self.model, torch_dtype=self.torch_dtype)

    @property
    def world_size(self) -> int:
        """Return the number of ranks, one per die."""
        return self.train.world_size

    @property
    def samples(self) -> bool:
        """Return whether the run samples its responses; an objective on fixed data starts no rollout engine."""
        return self.recipe.objective.name == "rl"

    @property
    def trains_actor(self) -> bool:
        """Return whether the run trains an actor; the objectives of value models train the critic alone."""
        return self.recipe.objective.name not in VALUE_OBJECTIVES

    @property
    def reward_models(self) -> tuple[Reward, ...]:
        """Return the entries of recipe.rewards that are reward models, in their order."""
        return tuple(part.entry for part in self.rewards if part.entry.name == "reward_model")

    @property
    def train_library(self) -> str:
        """Return the name of the training library in layout/sharding.py."""
        return train_library(self.line)

    @property
    def rollout_library(self) -> str:
        """Return the name of the rollout library in layout/sharding.py; multistream_moe keeps shared experts whole."""
        return "vllm-ascend" if self.graphs.get("enable_multistream_moe") else "vllm"

    @property
    def ascend(self) -> Mapping[str, Any]:
        """Return vllm-ascend's options: additional_config of vLLM's engine."""
        return self.engine.get("additional_config") or {}

    @property
    def splits_prompts(self) -> bool:
        """Return whether the engine on NPUs spreads a long prompt over steps, as vLLM V1's scheduler does."""
        scheduler = self.ascend.get("ascend_scheduler_config") or {}
        return self.as_npu and (not scheduler.get("enabled") or bool(scheduler.get("enable_chunked_prefill")))

    @property
    def takes_whole_prompts(self) -> bool:
        """Return whether the Ascend scheduler takes prompts whole, and drops a request that exceeds a step's budget."""
        return self.samples and self.as_npu and not self.splits_prompts

    @property
    def graphs(self) -> Mapping[str, Any]:
        """Return vllm-ascend's torchair_graph_config; empty where graphs are not enabled."""
        graph = self.ascend.get("torchair_graph_config") or {}
        return graph if graph.get("enabled") else {}

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Return the batch sizes of the decode graphs; empty where graphs are not enabled."""
        return tuple(self.graphs.get("graph_batch_sizes") or ())

    @property
    def max_num_seqs(self) -> int:
        """Return the most responses that a rollout replica decodes at once: max_num_seqs, or vLLM's default."""
        return self.engine.get("max_num_seqs") or _DEFAULT_MAX_NUM_SEQS

    @property
    def replicas(self) -> int:
        """Return the number of rollout replicas: vLLM's tensor-parallel groups."""
        return self.world_size // self.rollout.tp

    # these read verl's whole configuration, which only the controller has

    @property
    def critic(self) -> DictConfig | None:
        """Return verl's section `critic`; None where its trainer has no critic."""
        return self.verl.critic if self.has_critic else None

    @property
    def trained_sections(self) -> dict[str, DictConfig]:
        """Return {"actor" or "critic": verl's section} of the models that the run trains."""
        sections = {"actor": self.verl.actor_rollout_ref.actor} if self.trains_actor else {}
        return sections | ({"critic": self.verl.critic} if self.has_critic else {})

    @property
    def checkpoint_bytes(self) -> tuple[int, int]:
        """Return the bytes that a checkpoint has of weights, and of main weights and moments (modelled).

        fp32 weights are their own main weights.
        """
        trained = [build_inventory(self.model, value=name == "critic") for name in self.trained_sections]
        count = sum(parameter.count for inventory in trained for parameter in inventory.parameters)
        weight_bytes = DTYPE_BYTES[self.torch_dtype]
        return 0 if weight_bytes == 4 else weight_bytes * count, OPTIMIZER_BYTES * count

    @property
    def uses_reference(self) -> bool:
        """Return whether the loss or the reward needs the reference model's log-probs."""
        return bool(self.verl.actor_rollout_ref.actor.use_kl_loss or self.verl.algorithm.use_kl_in_reward)

    @property
    def validates(self) -> bool:
        """Return whether verl samples responses of data.val_files."""
        return self.verl.trainer.test_freq > 0 or self.verl.trainer.val_before_train

    @property
    def longest_tokens(self) -> int:
        """Return the most tokens that a prompt and its response may have."""
        return self.verl.data.max_prompt_length + self.verl.data.max_response_length

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a request to vLLM: rollout.max_model_len, or prompt and response."""
        return self.verl.actor_rollout_ref.rollout.max_model_len or self.longest_tokens

    @property
    def step_budget(self) -> int:
        """Return the most tokens of a step of vLLM's engine; the Ascend scheduler may have a limit of its own."""
        scheduler = self.ascend.get("ascend_scheduler_config") or {}
        return scheduler.get("max_num_batched_tokens") or self.verl.actor_rollout_ref.rollout.max_num_batched_tokens

    @property
    def reads_weights(self) -> bool:
        """Return whether training or vLLM reads the weights of the model's folder; False with random init."""
        actor, rollout = self.verl.actor_rollout_ref.actor, self.verl.actor_rollout_ref.rollout
        trained = actor.load_weight and not actor.megatron.use_dist_checkpointing
        return trained or not rollout.load_format.startswith("dummy")

    @property
    def model_folder(self) -> Path:
        """Return the model's folder; it need not exist on this machine."""
        return Path(self.verl.actor_rollout_ref.model.path)

    @property
    def home(self) -> Path:
        """Return the absolute folder of all starts of the run: <recipe.output_root>/<recipe.run>."""
        if self.recipe.output_root is None or self.recipe.run is None:
            raise ConfigError("recipe.output_root or recipe.run is null; expected a folder and a run name: set both")
        return Path(self.recipe.output_root, self.recipe.run)

    @property
    def folder(self) -> Path:
        """Return the absolute folder that the start writes to; its name is START until it is made."""
        return self.home / (self.start.name or "START")

    def with_verl(self, values: Mapping[str, Any]) -> RunSpec:
        """Return the run with other values of verl's own keys; the facts are not resolved again."""
        config = self.verl.copy()
        OmegaConf.set_readonly(config, False)
        for key, value in values.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        OmegaConf.set_readonly(config, True)
        return replace(self, verl=config)

    @property
    def process_switches(self) -> Switches:
        """Return the switches of every process of the run, which name the rows that are on."""
        return replace(self.switches, rows=tuple(sorted(self.rows)))

    def text(self) -> str:
        """Return the facts that the controller and workers need as JSON text; `run_from_config` reads them."""
        return _facts_adapter().dump_json(self, exclude=_LAUNCHER_FIELDS, fallback=str).decode()


Rule = Callable[[RunSpec], Iterable[Check]]


class Rules(NamedTuple):
    """Hold the table of rules (rules.py): on files, on `sizes` (layouts, sizes, options), and on the machine.

    launcherless: those of `sizes` that are also checked without the launcher. A rule is a function in the file of its
    feature, which yields a `Check` for each thing that it inspects.
    """

    files: tuple[Rule, ...]
    sizes: tuple[Rule, ...]
    machine: tuple[Rule, ...]
    launcherless: frozenset[Rule]

    def checks(self, run: RunSpec) -> Iterator[Check]:
        """Yield the checks of all rules on a run, in their order."""
        for rule in (*self.files, *self.sizes, *self.machine):
            yield from rule(run)


def read_run(text: str, verl: DictConfig) -> RunSpec:
    """Return the facts of a run from their JSON text, and write them into its composed configuration `verl`."""
    write_run(verl, text)
    OmegaConf.set_readonly(verl, True)
    return replace(_parse_facts(text), verl=verl)


def run_from_config(section: DictConfig) -> RunSpec:
    """Return the facts of the run to which this verl configuration, or section of one, belongs.

    Raises ConfigError where neither the launcher nor import_alone.py has written them there (`write_run`).
    """
    text = section.get(RUN)
    if text is None:
        raise ConfigError(
            f"this section of verl's configuration has no key {RUN!r}; expected the facts of the run, from the "
            "launcher or from patch row update.recipe_by_default: start with "
            f"`{our_command('train', '--config-name', 'CONFIG')}`, or keep that row on"
        )
    run = _parse_facts(text)
    return replace(run, verl=section) if "actor_rollout_ref" in section else run


@functools.lru_cache(4)
def _parse_facts(text: str) -> RunSpec:
    return _facts_adapter().validate_json(text)


@functools.cache
def _facts_adapter() -> TypeAdapter[RunSpec]:
    return TypeAdapter(RunSpec)


def write_run(config: DictConfig, text: str) -> None:
    """Write the facts of a run into `config`, verl's configuration, where its trainer and workers read them."""
    for section in (config, config.actor_rollout_ref, config.critic, config.reward_model):
        with open_dict(section):
            section[RUN] = text
