"""Build the smoke run: its options as Hydra overrides, and the model and data that it needs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.run.compose import check_choice
from verl_patches.run.resolve import CONFIGS_DIR
from verl_patches.step.objectives.settings import COLUMNS

CONFIG_NAME, LEARN_CONFIG_NAME = "deepseekv3_tiny_cpu", "deepseekv3_tiny_cpu_learn"
DEFAULTS = {"algo": "grpo", "layout": "ep2", "rollout": "tp1"}  # as in the defaults of the two configs
REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE = REPOSITORY / "data" / "deepscaler_sample.json"
PREPARE_S = 300
PROMPT_TOKENS = "256"  # data.max_prompt_length of the config
LEARN_TASK = [str(REPOSITORY / "data" / "make_learnable.py"), "768"]  # script, number of rows
_MAKE_MODEL = """
import json
import sys
from pathlib import Path
from verl_patches.model.tiny import make_tiny_model
make_tiny_model(Path(sys.argv[1]), int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
"""

# "line platform" -> what a smoke run there proves if it ends well; UNPROVED_TEXT: what none proves (docs/line-a3.md)
PROOF_TEXTS = {
    "pypi cpu": "the whole loop (patches, layouts, weight sync) runs here on packages of line pypi, not production's",
    "a3 cpu": "production's verl, Megatron and MindSpeed run the whole loop here, with vLLM's engine V0",
    "a3 npu_emulated": "production's Python runs the whole loop here: verl, Megatron, MindSpeed, vLLM V1, vllm-ascend",
}
UNPROVED_TEXT = (
    "anything about NPU kernels and their numerics, HCCL, torchair's compiler, what fits on a device, or speed"
)


@dataclass(frozen=True)
class SmokeOptions:
    """Hold the options of `smoke`, which its --help describes. overrides: the user's Hydra overrides."""

    overrides: Sequence[str] = ()
    steps: int | None = None
    dtype: str = "fp32"
    replay_rollout: Path | None = None
    learn: bool = False
    run: str | None = None
    seed: int = 0
    line: str = "pypi"
    emulate_npu: bool = False

    @property
    def model_shape(self) -> str:
        """Return the model's config.json in configs/: the last override recipe.model_shape=FILE, or the default.

        With 256 experts vllm-ascend routes by the op that DeepSeek-V3 uses.
        """
        default = "model/deepseekv3_tiny_256experts.json" if self.emulate_npu else "model/deepseekv3_tiny.json"
        return self.chosen_value("recipe.model_shape", default)

    @property
    def config_name(self) -> str:
        """Return the name of the config file that the run is composed from."""
        return LEARN_CONFIG_NAME if self.learn else CONFIG_NAME

    def chosen_name(self, group: str) -> str:
        """Return the name that the last override GROUP=NAME chooses, or the default."""
        return self.chosen_value(group, DEFAULTS[group])

    def chosen_value(self, key: str, default: str) -> str:
        """Return the value of the last override KEY=VALUE, or the default."""
        values = [word.partition("=")[2] for word in self.overrides if word.startswith(f"{key}=")]
        return values[-1] if values else default

    @property
    def run_name(self) -> str:
        """Return the run's name: --run, or smoke or learn with other choices than the default (smoke-ppo-tp2ep2-a3).

        The name of a rollout follows its group's name, as a train layout may have the same name.
        """
        if self.run is not None:
            return self.run
        parts = ["learn" if self.learn else "smoke"]
        for group, default in DEFAULTS.items():
            if (name := self.chosen_name(group)) != default:
                parts.append(f"rollout_{name}" if group == "rollout" else name)
        if self.line != "pypi":
            parts.append("npu_emulated" if self.emulate_npu else self.line)
        return "-".join(parts)


def smoke_overrides(options: SmokeOptions, inputs: Sequence[str] = ()) -> list[str]:
    """Return all Hydra overrides of a smoke: those of its options, of model and data (`Inputs`), then the user's.

    layout=NAME becomes layout=LINE/NAME. Raise ConfigError for a wrong combination.
    """
    check_choice("layout", options.chosen_name("layout"), CONFIGS_DIR / "layout" / options.line)
    if options.emulate_npu and options.line != "a3":
        raise ConfigError(f"--emulate-npu with --line {options.line}: expected --line a3, the only line for NPUs")
    seeded = "actor_rollout_ref.actor.megatron", "data", "actor_rollout_ref.rollout"
    overrides = [
        f"recipe.run={_quoted(options.run_name)}",
        f"recipe.line={options.line}",
        f"recipe.dtype={options.dtype}",
        f"layout={options.line}/{options.chosen_name('layout')}",
        *(f"{section}.seed={options.seed}" for section in seeded),
    ]
    if options.emulate_npu:
        overrides += ["recipe.platform=npu_emulated", "trainer.device=npu", f"recipe.model_shape={options.model_shape}"]
        overrides.append("recipe.train.distributed_timeout_minutes=18")  # HCCL's AIV mode allows no more
    if options.steps:
        overrides.append(f"trainer.total_training_steps={options.steps}")
    if options.replay_rollout:
        overrides.append(f"recipe.rollout.replay={_quoted(options.replay_rollout.resolve())}")
    return [*overrides, *inputs, *(word for word in options.overrides if not word.startswith("layout="))]


@dataclass(frozen=True)
class Inputs:
    """Hold the folders of a smoke's model and data in a cache; their paths are known before they are made.

    model: the model's folder. tasks: {folder of a task's data: arguments of the Python that makes it}.
    """

    options: SmokeOptions
    model: Path
    tasks: dict[Path, list[str]]

    @property
    def overrides(self) -> list[str]:
        """Return the Hydra overrides that name model and data."""
        trains, tests = ([_quoted(f / f"{split}.parquet") for f in self.tasks] for split in ("train", "test"))
        return [
            f"actor_rollout_ref.model.path={_quoted(self.model)}",
            f"data.train_files=[{','.join(trains)}]",
            f"data.val_files=[{','.join(tests)}]",
        ]

    def make(self, say: Callable[[str], None]) -> None:
        """Make the folders that do not exist, each in its own process, as the launcher does not import torch.

        A folder appears whole or not at all. Raise ConfigError with the end of the process's output if one fails.
        """
        if not self.model.exists():
            say(f"making the tiny model, seed {self.options.seed}")
            words = str(self.model), str(self.options.seed), str(CONFIGS_DIR / self.options.model_shape)
            _run_command([sys.executable, "-c", _MAKE_MODEL, *words], "the tiny model")
        for folder, task in self.tasks.items():
            if not folder.exists():
                say(f"preparing the data: {folder.name.partition('-')[0]}")
                _make_data(task, folder)


def smoke_inputs(options: SmokeOptions, cache: Path) -> Inputs:
    """Return the model and data of `options`; a digest of all that a folder is made from is in its name.

    An objective on fixed data (algo=...) has only the learnable task, with answers.
    """
    algorithm = options.chosen_name("algo")
    makers = ("model/tiny.py", "layout/inventory.py")
    sources = [CONFIGS_DIR / options.model_shape, *(REPOSITORY / "verl_patches" / file for file in makers)]
    model = cache / f"deepseekv3_tiny-seed{options.seed}-{_digest(sources)}"
    paths = {"input": SAMPLE, "tokenizer_name_or_path": model}
    maths = ["-m", "verl_patches", "data", "build", str(SAMPLE.with_name("sample.yaml"))]
    maths += [f"{key}={json.dumps(str(path))}" for key, path in paths.items()]
    maths.append(f"seq_length={PROMPT_TOKENS}")
    tasks = {"learnable": LEARN_TASK} if options.learn else {"maths": maths, "learnable": LEARN_TASK}
    if algorithm in COLUMNS:
        tasks = {"learnable": [*LEARN_TASK, "--answers", "unpaired" if algorithm == "kto" else "paired"]}
    patterns = ["data/*.py", "data/*.yaml", "verl_patches/tools/data/*.py", "verl_patches/rewards/*.py"]
    patterns.append("verl_patches/step/objectives/chat.py")
    sources += [SAMPLE, *(file for pattern in patterns for file in sorted(REPOSITORY.glob(pattern)))]
    folders = {cache / f"{name}-{_digest(sources, *task[1:2], task[-1])}": task for name, task in tasks.items()}
    return Inputs(options, model, folders)


def _make_data(task: Sequence[str], folder: Path) -> None:
    making = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        _run_command([sys.executable, *task, "-o", str(making)], "the data")
        making.rename(folder)
    except OSError:
        if not folder.exists():  # false where another run has made it meanwhile
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _run_command(command: Sequence[str], product: str) -> None:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    settings = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env, text = {**os.environ, **settings, "PYTHONPATH": path}, f"command: {' '.join(command)}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PREPARE_S, env=env)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"smoke: making {product} took more than {PREPARE_S} s and was stopped; {text}") from None
    if done.returncode:
        tail = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise ConfigError(f"smoke: making {product} failed with exit code {done.returncode}:\n  {tail}\n  {text}")


def _digest(files: Sequence[Path], *words: str) -> str:
    """Return twelve hex digits of a hash over files and words, for names of cached folders."""
    contents = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256("\0".join(words).encode() + contents).hexdigest()[:12]


def _quoted(value: str | Path) -> str:
    """Return a text quoted for Hydra's override grammar, which then takes any characters."""
    return "'" + str(value).replace("'", "\\'") + "'"
