"""Define chains of commands on the task of data/make_learnable.py, in which later commands read earlier ones' output.

`bash scripts/recipes.sh --where chains [--only NAME]` runs them (scripts/recipe_runs.py records the results), and
tests/loop/test_chains.py runs them with two steps a run. A chain yields commands, each as the words after `python`;
they write below one folder.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_patches.rewards.learnable import DATA_SOURCE
from verl_patches.values import read_yaml
from verl_patches.weights.run_folders import LATEST_LINK

ROOT = Path(__file__).resolve().parent.parent
ROWS, STEPS, MEAN_STEPS = 768, 40, 5  # MEAN_STEPS: number of first, and of last, steps that are averaged
PROGRAM = ("-m", "verl_patches")
Words = list[str]
Figure = tuple[str, str, float, str, float]  # measured quantity; start and its value; end and its value
_MICRO_BATCH = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=6",)
_PAIR_MICRO_BATCH = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=12",)


def _records_command(folder: Path) -> Words:
    return ["data/make_learnable.py", str(ROWS), "-o", str(folder / "records.jsonl"), "--overwrite"]


def _build_command(folder: Path, handler: str, output: str) -> Words:
    keys = [f"input={folder / 'records.jsonl'}", f"handler_name={handler}", f"data_source={DATA_SOURCE}"]
    keys += ["prompt_type=model", "shuffle=false", "test_size=30"]  # records come in balanced groups of three
    return [*PROGRAM, "data", "build", "data/sample.yaml", *keys, "-o", str(folder / output)]


def _run_command(folder: Path, run: str, algo: str, steps: int, *overrides: str) -> Words:
    head = ["smoke", "--learn", "--run", run, "--steps", str(steps), f"algo={algo}"]
    return [*PROGRAM, *head, f"trainer.save_freq={steps}", *overrides, f"recipe.output_root={folder}"]


def _data_overrides(folder: Path, train: str, test: str) -> Words:
    return [f"data.train_files={folder / train / 'train.parquet'}", f"data.val_files={folder / test / 'test.parquet'}"]


def _eval_command(folder: Path, model: Path, name: str, *overrides: str) -> Words:
    return [*PROGRAM, "eval", str(model), str(folder / f"eval_{name}"), *overrides]


def _hf_overrides(folder: Path) -> Words:
    """Return the evaluation's data and reward, for models whose run does not name them."""
    return [f"data.val_files={folder / 'prompts' / 'test.parquet'}", "recipe.rewards=[{name: learnable}]"]


def base_model(run: Path) -> Path:
    """Return the model that the newest start of a run began with."""
    return Path(read_yaml(run / LATEST_LINK / "config.yaml")["actor_rollout_ref"]["model"]["path"])


# ---- the chains


def sft_grpo(folder: Path, steps: int = STEPS) -> Iterator[Words]:
    """Yield data build, SFT, export, GRPO from the export, eval of all three models, generate."""
    learn = ("--config-name", "deepseekv3_tiny_cpu_learn")
    yield _records_command(folder)
    yield _build_command(folder, "instruction", "answers")
    yield _build_command(folder, "maths", "prompts")
    yield _run_command(folder, "sft", "sft", steps, *_MICRO_BATCH, *_data_overrides(folder, "answers", "answers"))
    hf = folder / "hf"
    yield [*PROGRAM, "weights", "export", str(folder / "sft"), str(hf)]
    validated = ("trainer.val_before_train=true", f"trainer.test_freq={steps}")
    start = (f"actor_rollout_ref.model.path={hf}", *_data_overrides(folder, "prompts", "prompts"), *validated)
    yield _run_command(folder, "grpo", "grpo", steps, *start)
    yield _eval_command(folder, base_model(folder / "sft"), "base", *learn, *_hf_overrides(folder))
    yield _eval_command(folder, hf, "sft", *learn, *_hf_overrides(folder))
    yield _eval_command(folder, folder / "grpo", "grpo")
    prompts, answers = folder / "prompts" / "test.parquet", folder / "generated.jsonl"
    greedy = ("--temperature", "0", "--max-tokens", "16")
    yield [*PROGRAM, "generate", str(folder / "grpo"), str(prompts), str(answers), *greedy]


def rm_ppo(folder: Path, steps: int = STEPS) -> Iterator[Words]:
    """Yield data build of pairs, a reward model, and PPO with that model as reward; the task's own is only measured."""
    yield _records_command(folder)
    yield _build_command(folder, "preference", "pairs")
    yield _build_command(folder, "maths", "prompts")
    yield _run_command(folder, "rm", "rm", steps, *_PAIR_MICRO_BATCH, *_data_overrides(folder, "pairs", "pairs"))
    model = folder / "rm" / LATEST_LINK / "checkpoints" / f"global_step_{steps}"
    rewards = f"recipe.rewards=[{{name: reward_model, path: {model}}},{{name: learnable, weight: 0}}]"
    yield _run_command(folder, "ppo", "ppo", steps, rewards, *_data_overrides(folder, "prompts", "prompts"))


def rollouts_sft(folder: Path, steps: int = STEPS) -> Iterator[Words]:
    """Yield GRPO, the selection of its best responses, SFT of the base model on them, eval."""
    yield _records_command(folder)
    yield _build_command(folder, "maths", "prompts")
    validated = ("trainer.val_before_train=true", f"trainer.test_freq={steps}")
    yield _run_command(folder, "grpo", "grpo", steps, *_data_overrides(folder, "prompts", "prompts"), *validated)
    yield from best_sft(folder, steps)


def best_sft(folder: Path, steps: int) -> Iterator[Words]:
    """Yield the commands of rollouts_sft that use the recorded responses of the run `grpo`."""
    yield [*PROGRAM, "data", "from-rollouts", str(folder / "grpo"), "-o", str(folder / "best")]
    data = [f"data.{name}_files={folder / 'best' / 'train.parquet'}" for name in ("train", "val")]
    cut = "data.truncation=right"  # a text may have more tokens than its sampled response
    yield _run_command(folder, "sft_of_best", "sft", steps, *_MICRO_BATCH, *data, cut)
    yield _eval_command(folder, folder / "sft_of_best", "sft_of_best", *_hf_overrides(folder))


# ---- their figures


def _accuracy(folder: Path, name: str) -> float:
    (step,) = json.loads((folder / f"eval_{name}" / "eval.json").read_text())["steps"]
    return step["score"]


def _curve_figure(folder: Path, run: str, metric: str, quantity: str) -> Figure:
    lines = [json.loads(line) for line in (folder / run / LATEST_LINK / "metrics.jsonl").read_text().splitlines()]
    values = [line[metric] for line in lines if line["step"]]  # step 0 is a validation
    ends = [statistics.fmean(part) for part in (values[:MEAN_STEPS], values[-MEAN_STEPS:])]
    return quantity, f"first {MEAN_STEPS} steps", ends[0], f"last {MEAN_STEPS}", ends[1]


def sft_grpo_figures(folder: Path) -> list[Figure]:
    base, sft, grpo = (_accuracy(folder, name) for name in ("base", "sft", "grpo"))
    rows = len((folder / "generated.jsonl").read_text().splitlines())
    figures = [("accuracy", "base", base, "SFT", sft), ("accuracy", "SFT", sft, "GRPO", grpo)]
    return [*figures, ("prompts answered", "none", 0, "all", rows)]


def rm_ppo_figures(folder: Path) -> list[Figure]:
    rm = _curve_figure(folder, "rm", "objective/accuracy", "accuracy of the reward model on pairs")
    return [rm, _curve_figure(folder, "ppo", "reward/reward_model", "its score of PPO's responses")]


def rollouts_sft_figures(folder: Path) -> list[Figure]:
    lines = (folder / "grpo" / "metrics.jsonl").read_text().splitlines()
    before = next(line for line in map(json.loads, lines) if line["step"] == 0)
    base = before[f"val-core/{DATA_SOURCE}/reward/mean@1"]
    loss = _curve_figure(folder, "sft_of_best", "objective/loss", "loss of the SFT (falls)")
    return [loss, ("accuracy", "base", base, "SFT", _accuracy(folder, "sft_of_best"))]


@dataclass(frozen=True)
class Chain:
    """Describe a chain by its commands, its figures, and the least change of each figure.

    least: the least rise of each figure, or a fall where it is negative; about half of the changes that were seen.
    """

    commands: Callable[[Path], Iterator[Words]]
    figures: Callable[[Path], list[Figure]]
    least: tuple[float, ...]


CHAINS = {
    "sft_grpo": Chain(sft_grpo, sft_grpo_figures, (0.18, 0.17, 30)),
    "rm_ppo": Chain(rm_ppo, rm_ppo_figures, (0.15, 0.8)),
    "rollouts_sft": Chain(rollouts_sft, rollouts_sft_figures, (-1.8, 0.35)),
}


def shortfalls(name: str, figures: list[Figure]) -> str:
    """Return which figures of a chain change less than CHAINS states; empty if none do."""
    texts = []
    for (quantity, _, first, _, last), least in zip(figures, CHAINS[name].least, strict=True):
        change = last - first
        too_small = change < least if least > 0 else change > least
        if too_small:
            texts.append(f"{quantity} changed by {change:.4g}, expected {least:+.4g} or more")
    return "; ".join(texts)
