"""What `eval` measures: scores of responses by the training reward, mean@n, pass@k, intervals, and pictures of them.

The reward is that of the run: verl's load_reward_manager with row reward.parts. The measured value of a response is, as
in verl's validation, `acc` where the reward has it, else the reward. A row of the data is one prompt; verl counts rows
of equal text as one prompt with more responses.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from verl_patches.errors import RecipeError
from verl_patches.trainer.validation import pass_at_k

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIDENCE, DRAWS = 0.95, 1000
WILSON = "Wilson's score interval over prompts"
BOOTSTRAP = f"percentiles of {DRAWS} bootstrap draws of prompts"


def scorer(config: DictConfig, tokenizer: Any) -> Callable[[Mapping[str, Any], Sequence[Sequence[int]]], list[dict]]:
    """score(row, responses as tokens): of each response {value, reward, and what the reward's parts say}.

    Raises RecipeError where a part of the reward fails.
    """
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.utils.torch_functional import get_response_mask

    manager, longest = load_reward_manager(config, tokenizer, num_examine=1), config.data.max_response_length

    def score(row: Mapping[str, Any], responses: Sequence[Sequence[int]]) -> list[dict]:
        padded = [[*ids, *[tokenizer.pad_token_id or 0] * (longest - len(ids))] for ids in responses]
        ids = torch.tensor(padded)
        tensors = {"responses": ids, "attention_mask": get_response_mask(ids, tokenizer.eos_token_id)}
        of_row = {name: np.array([value] * len(padded), dtype=object) for name, value in row.items()}
        found = manager(DataProto.from_dict(tensors, of_row), return_dict=True)
        columns = {"reward": found["reward_tensor"].sum(-1).tolist(), **found["reward_extra_info"]}
        scores = [
            dict(zip(columns, map(_number, values), strict=True)) for values in zip(*columns.values(), strict=True)
        ]
        return [{"value": each.get("acc", each["reward"]), **each} for each in scores]

    return score


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def measure(values: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Of {source: values of the responses of each prompt}: {score, sources: {source: measures}}.

    score: the mean over sources of mean@n, as the trainer's `val`. A source's measures: prompts, n, mean, and low, high
    of its interval of CONFIDENCE with `interval`, which says how; pass: {k: pass@k} for k = 1, 2, 4, ... and n, where
    n > 1 and all values are 0 or 1.
    """
    sources = {source: _of_source(prompts) for source, prompts in sorted(values.items())}
    return {"score": statistics.fmean(each["mean"] for each in sources.values()), "sources": sources}


def _of_source(prompts: Sequence[Sequence[float]]) -> dict[str, Any]:
    n, means = len(prompts[0]), [statistics.fmean(prompt) for prompt in prompts]
    mean, binary = statistics.fmean(means), all(value in (0, 1) for prompt in prompts for value in prompt)
    if binary and n == 1:
        low, high, interval = *wilson(int(sum(means)), len(means)), WILSON
    else:
        low, high, interval = *bootstrap(means), BOOTSTRAP
    found = {"prompts": len(prompts), "n": n, "mean": mean, "low": low, "high": high, "interval": interval, "pass": {}}
    if binary and n > 1:
        for k in sorted({*(1 << power for power in range(n.bit_length()) if 1 << power < n), n}):
            found["pass"][k] = statistics.fmean(pass_at_k(n, int(sum(prompt)), k) for prompt in prompts)
    return found


def wilson(correct: int, count: int) -> tuple[float, float]:
    """Wilson's interval of CONFIDENCE for a share (Wilson 1927, J. Am. Stat. Assoc. 22:209)."""
    z, share = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2), correct / count
    middle, half = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / count / 2) ** 2)
    scale = 1 + z * z / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def bootstrap(means: Sequence[float]) -> tuple[float, float]:
    """The interval of CONFIDENCE for the mean of `means`, by percentiles of DRAWS draws with seed 0."""
    import numpy as np

    generator, given = np.random.default_rng(0), np.array(means, dtype=float)
    drawn = [given[generator.integers(len(given), size=len(given))].mean() for _ in range(DRAWS)]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def by_step(lines: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, list[list[float]]]]:
    """{step: {source: values of each prompt}} of the lines that `eval` writes."""
    found: dict[int, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        found[line["step"]][line["data_source"]].append([each["value"] for each in line["responses"]])
    return found


def is_wrong(line: Mapping[str, Any]) -> bool:
    """Whether a response of the line is not fully right."""
    return any(each["value"] < 1 for each in line["responses"])


def accuracy_figure(name: str, measured: Mapping[int, Mapping[str, Any]]) -> Figure:
    """mean@n of each source over the steps of a run, with intervals, and their mean."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, steps = figure.subplots(), sorted(measured)
    for source in dict.fromkeys(source for step in steps for source in measured[step]["sources"]):
        of = [measured[step]["sources"][source] for step in steps]
        errors = [[each["mean"] - each["low"] for each in of], [each["high"] - each["mean"] for each in of]]
        errors = [[max(0.0, size) for size in side] for side in errors]
        axes.errorbar(
            steps,
            [each["mean"] for each in of],
            errors,
            marker="o",
            markersize=3,
            capsize=3,
            label=source.replace("$", r"\$"),
        )
    if len(axes.containers) > 1:
        axes.plot(steps, [measured[step]["score"] for step in steps], color="black", label="mean of sources")
    axes.set(title=f"{name}: mean@{of[0]['n']}".replace("$", r"\$"), xlabel="step", ylabel="value")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def require_answers(rewards: Sequence[Any], key: str) -> Callable[[Mapping[str, Any]], None]:
    """A check of a row of data: ValueError without a text in column `key`, or without what the reward's parts need."""
    need = {part.entry.name for part in rewards} - {"format", "length", "reward_model", "python"}

    def check(row: Mapping[str, Any]) -> None:
        if not isinstance(row.get(key), str):
            raise ValueError(f"expected column {key} with text, found {type(row.get(key)).__name__}")
        gold = row.get("reward_model")
        if need and not (isinstance(gold, dict) and gold.get("ground_truth") is not None):
            raise ValueError(f"expected reward_model.ground_truth, which the reward {', '.join(sorted(need))} needs")

    return check


def failed_row(number: int, error: RecipeError) -> RecipeError:
    """The error of a reward with the row of the data."""
    return RecipeError(f"row {number} of the data: {error}")
