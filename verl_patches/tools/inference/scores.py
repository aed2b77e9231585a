"""Measure responses for `eval`: the training reward, mean@n, pass@k, intervals, accuracy over the steps of a run.

The reward is that of training: verl's load_reward_manager with row reward.parts. As in verl's validation, the value of
a response is `acc` where the reward has it, else the reward.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.spec import RunSpec, write_run
from verl_patches.tools.data.sources import file_facts
from verl_patches.trainer.validation import pass_at_k
from verl_patches.values import loading_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIDENCE, BOOTSTRAP_DRAWS = 0.95, 1000
ANSWER_CHARS = 200  # shown of a wrong answer in a report
WILSON, BOOTSTRAP = "Wilson", f"bootstrap of {BOOTSTRAP_DRAWS} draws"


def reward_facts(run: RunSpec) -> tuple[list[Any], list[str]]:
    """Return (the reward's entries and facts of their Python files, labels of its models, which no validation runs)."""
    parts = run.rewards
    models = [part.label for part in parts if part.entry.name == "reward_model"]
    if len(models) == len(parts):
        found = "reward models alone, which eval does not run" if models else "none: this run has no reward"
        raise ConfigError(
            f"recipe.rewards: expected a part that eval can run, found {found}; "
            "give 'recipe.rewards=[{name: maths}]' and data.val_files with gold answers"
        )
    with loading_errors("recipe.rewards: expected Python files that can be read"):
        files = [file_facts(Path(part.path)) for part in parts if part.entry.name == "python"]
    return [*(asdict(part.entry) for part in parts), *files], models


def scorer(
    run: RunSpec, tokenizer: Any, row: Mapping[str, Any]
) -> Callable[[Mapping[str, Any], Sequence[Sequence[int]]], list[dict[str, Any]]]:
    """Return score(row, tokens of its responses), which returns {value, reward, results of parts} of each response.

    `row` is scored here with a response of one token, so that a reward that fails does so before an engine starts.
    """
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.utils.torch_functional import get_response_mask

    verl = run.verl.copy()
    OmegaConf.set_readonly(verl, False)
    write_run(verl, run.text())
    manager, longest = load_reward_manager(verl, tokenizer, num_examine=1), run.verl.data.max_response_length

    def score(row: Mapping[str, Any], responses: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        ids = torch.full((len(responses), longest), tokenizer.pad_token_id or 0)
        for padded, tokens in zip(ids, responses, strict=True):
            padded[: len(tokens)] = torch.tensor(tokens)
        mask = get_response_mask(ids, tokenizer.eos_token_id)
        for kept, tokens in zip(mask, responses, strict=True):
            kept[len(tokens) :] = 0  # vLLM may have stopped at another end token of generation_config.json
        tensors = {"responses": ids, "attention_mask": mask}
        row_columns = {name: np.array([value] * len(ids), dtype=object) for name, value in row.items()}
        found = manager(DataProto.from_dict(tensors, row_columns), return_dict=True)
        columns = {"reward": found["reward_tensor"].sum(-1).tolist(), **found["reward_extra_info"]}
        scores = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [{"value": float(each["acc"] if "acc" in each else each["reward"]), **each} for each in scores]

    score(row, [[tokenizer.eos_token_id]])
    return score


def checkpoint_scores(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return step, score (mean over sources), sources (`measure`) and wrong answers of each checkpoint's responses."""
    steps = []
    for step, step_lines in itertools.groupby(lines, lambda line: line["step"]):
        values, wrong = dict[str, list[Any]](), []
        for line in step_lines:
            found = [response["value"] for response in line["responses"]]
            values.setdefault(line["data_source"], []).append(found)
            if min(found) < 1:
                answer = line["responses"][found.index(min(found))]["text"][:ANSWER_CHARS]
                wrong.append({"row": line["row"], "expected": line["ground_truth"], "found": answer})
        sources = {source: measure(each) for source, each in values.items()}
        score = statistics.fmean(each["mean"] for each in sources.values())
        steps.append({"step": step, "score": score, "sources": sources, "wrong": wrong})
    return steps


def measure(prompts: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return prompts, n, mean, its interval (low, high, how it was made) and pass, of n response values to each prompt.

    pass: {k: pass@k} for k = 1, 2, 4, ... and n, where n > 1 and all values are 0 or 1.
    """
    n, means = len(prompts[0]), [statistics.fmean(prompt) for prompt in prompts]
    binary = all(value in (0, 1) for prompt in prompts for value in prompt)
    alone = binary and n == 1
    low, high = wilson_interval(int(sum(means)), len(means)) if alone else bootstrap_interval(means)
    found = {"prompts": len(prompts), "n": n, "mean": statistics.fmean(means), "low": low, "high": high}
    passes = {}
    if binary and n > 1:
        for k in sorted({n, *(2**power for power in range(n.bit_length()))}):
            passes[k] = statistics.fmean(pass_at_k(n, int(sum(prompt)), k) for prompt in prompts)
    return {**found, "interval": WILSON if alone else BOOTSTRAP, "pass": passes}


def wilson_interval(correct: int, count: int) -> tuple[float, float]:
    """Return Wilson's interval for a share, at CONFIDENCE."""
    from scipy.stats import binomtest

    interval = binomtest(correct, count).proportion_ci(CONFIDENCE, "wilson")
    return float(interval.low), float(interval.high)


def bootstrap_interval(means: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap interval for the mean of `means`, at CONFIDENCE, with seed 0."""
    import numpy as np

    generator, given = np.random.default_rng(0), np.array(means)
    drawn = [given[generator.integers(len(given), size=len(given))].mean() for _ in range(BOOTSTRAP_DRAWS)]
    low, high = (float(np.quantile(drawn, side)) for side in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return low, high


def accuracy_figure(name: str, steps: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the mean of each source, with its interval, over `steps`: {step, sources: {source: measures}}."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for source in steps[0]["sources"]:
        measures = [step["sources"][source] for step in steps]
        means = [each["mean"] for each in measures]
        sides = [[abs(each["mean"] - each[side]) for each in measures] for side in ("low", "high")]
        label = source.replace("$", r"\$")
        axes.errorbar([step["step"] for step in steps], means, sides, marker="o", capsize=3, label=label)
    axes.set(title=name.replace("$", r"\$"), xlabel="step", ylabel=f"mean@{measures[0]['n']}")
    axes.legend()
    return figure
