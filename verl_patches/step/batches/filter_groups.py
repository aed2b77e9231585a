"""Sample dynamically as in DAPO (arXiv:2503.14476, section 3.2) in verl's own fit(): recipe.filter_groups.

A prompt whose responses all have the same reward gives no gradient: it is left out, and more prompts are drawn until
the batch of the step is full. The rest of the last drawn batch is dropped, so a resumed run needs only the data
loader's own state.

    fit() of both verl versions                  here
    for batch_dict in self.train_dataloader      __iter__: verl's loader, without end; only the columns of the rollout
    generate_sequences(gen_batch), in timer gen  draw_filtered_groups: draws, generates, scores
    batch.repeat(n).union(responses)             responses of kept prompts, with all other columns of these prompts

verl scores kept responses a second time. The rollout engine stays awake meanwhile, with one weight sync a step
(trainer/worker_group.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from verl import DataProto

from verl_patches.errors import ConfigError, RecipeError

# columns that fit() pops from the batch for generate_sequences
_ROLLOUT_COLUMNS = {"input_ids", "attention_mask", "position_ids", "raw_prompt_ids", "raw_prompt", "tools_kwargs"}
SCORE = "score"  # the reward itself; other metrics are keys of the reward function's dict


class FilterGroupsLoader:
    """Wrap verl's data loader of `trainer`, and draw from it the prompts of a step.

    generate(prompts) makes their responses. on_call(name) is called before each scoring, and before each generation but
    the first. `report` after a step: {drawn_batches, prompts: prompts drawn, differ: prompts with different rewards,
    kept_share: differ / prompts}.
    """

    def __init__(self, trainer: Any, generate: Callable[[DataProto], DataProto], on_call: Callable[[str], None]):
        self._trainer, self._generate, self._on_call = trainer, generate, on_call
        self._loader, self._section = trainer.train_dataloader, trainer.config.recipe.filter_groups
        self._batches: Iterator[dict[str, Any]] = iter(())
        self._step_batch: dict[str, Any] = {}
        self.report: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches without end, as a step may take several: the number of steps ends fit(), not the epochs."""
        self._batches = iter(self._loader)
        while True:
            self._step_batch = self._next_batch()
            yield {name: column for name, column in self._step_batch.items() if name in _ROLLOUT_COLUMNS}

    def _next_batch(self) -> dict[str, Any]:
        while (batch := next(self._batches, None)) is None:
            self._batches = iter(self._loader)  # the next epoch
        return batch

    def draw_filtered_groups(self, prompts: DataProto) -> DataProto:
        """Return the responses of len(`prompts`) kept prompts; RecipeError where the batches have fewer."""
        size, batch, most = len(prompts), self._step_batch, self._section.max_num_gen_batches
        names = {"batch_keys": list(prompts.batch.keys()), "non_tensor_batch_keys": list(prompts.non_tensor_batch)}
        rows: list[tuple[dict[str, Any], int]] = []  # (drawn batch, row) of each prompt with different rewards
        found: list[DataProto] = []
        for drawn in range(1, most + 1):
            whole = DataProto.from_single_dict(batch)
            own = whole.pop(**names)
            differ = self._sample_groups(prompts if drawn == 1 else own, whole, found)
            rows += [(batch, int(row)) for row in np.flatnonzero(differ)]
            if len(rows) >= size or drawn == most:
                break
            batch = self._next_batch()
            self._on_call("generate_sequences")
        self.report = {"drawn_batches": drawn, "prompts": drawn * size, "differ": len(rows)}
        self.report["kept_share"] = len(rows) / (drawn * size)
        if len(rows) < size:
            raise RecipeError(
                f"recipe.filter_groups: only {len(rows)} of {drawn * size} prompts "
                f"({self.report['kept_share']:.1%}) in {drawn} batches have responses that differ in "
                f"{self._section.metric!r}, expected {size} for the step. The data are too easy or too hard for the "
                "model: look at its rewards, raise recipe.filter_groups.max_num_gen_batches or rollout.n, or set "
                "recipe.filter_groups.metric=null"
            )
        kept = DataProto.concat(found)
        n = len(kept) // len(rows)
        kept = kept[: size * n]
        for name in self._step_batch.keys() - _ROLLOUT_COLUMNS:
            column = [drawn_batch[name][row] for drawn_batch, row in rows[:size]]
            if torch.is_tensor(column[0]):
                kept.batch[name] = torch.stack(column).repeat_interleave(n, 0)
            else:
                kept.non_tensor_batch[name] = np.fromiter(column, dtype=object, count=size).repeat(n)
        return kept

    def _sample_groups(self, prompts: DataProto, rest: DataProto, found: list[DataProto]) -> np.ndarray:
        """Return which prompts have responses with different rewards, [prompts]; append these responses to `found`.

        `rest`: the columns of the batch that verl does not generate from; the reward reads them.
        """
        output = self._generate(prompts)
        self._on_call("reward")
        n, metric = len(output) // len(prompts), self._section.metric
        result = self._trainer.reward_fn(rest.repeat(n, interleave=True).union(output), return_dict=True)
        values = {**(result.get("reward_extra_info") or {}), SCORE: result["reward_tensor"].sum(-1)}
        if metric not in values:
            raise ConfigError(
                f"recipe.filter_groups.metric is {metric!r}; the reward function gives {', '.join(values)}"
            )
        prompt_values = np.asarray(values[metric], dtype=float).reshape(-1, n)
        # exact; the standard deviation of equal numbers may exceed 0
        differ = prompt_values.max(1) > prompt_values.min(1)
        found.append(output[np.flatnonzero(differ.repeat(n))])
        return differ
