"""DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) for verl's own fit(): recipe.keep_groups.

A prompt whose responses all have the same reward gives no gradient: it is left out, and more prompts are drawn until
the batch of the step is full. What is left over of the last drawn batch is dropped, so the data loader's own state
is all that a resumed run needs.

    fit() of both pins                                   here
    for batch_dict in self.train_dataloader              __iter__: verl's loader, without end; keeps the batch it gave
    batch = DataProto.from_single_dict(batch_dict)       shares the columns of batch_dict: no copy
    with timer gen: generate_sequences(gen_batch)        generate_sequences: draws, generates, scores and keeps; then
                                                         writes the kept prompts into the columns, in place
    batch.repeat(n).union(responses)                     rows of the kept prompts, and their responses

So drawing, generating and scoring are inside verl's timers `gen` and `step`. verl scores the kept responses once more.
The rollout engine stays awake meanwhile: one weight sync a step (worker/sharding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from verl import DataProto

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.phases import STAYS_AWAKE

SCORE = "score"  # the reward itself; other metrics are keys of the reward function's dict


class KeepGroupsError(RecipeError):
    """Too few prompts have responses with different rewards."""


class KeptGroups:
    """verl's data loader of `trainer`, and the sampling of a step from it by `workers`, verl's own group.

    on_call(name) is called before each generation and each scoring. `report` after a step: {drawn_batches, prompts,
    differ: prompts drawn, and those with different rewards; kept_share: the second by the first}.
    """

    def __init__(self, trainer: Any, workers: Any, on_call: Callable[[str], None]):
        self._trainer, self._workers, self._on_call = trainer, workers, on_call
        self._loader, self._section = trainer.train_dataloader, trainer.config.recipe.keep_groups
        self._batches: Iterator[dict[str, Any]] = iter(())
        self._given: dict[str, Any] = {}
        self.report: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches without end, as a step may take several: the number of steps ends fit(), not the epochs."""
        self._batches = iter(self._loader)
        while True:
            self._given = self._draw()
            yield self._given

    def _draw(self) -> dict[str, Any]:
        while (batch := next(self._batches, None)) is None:
            self._batches = iter(self._loader)  # the next epoch
        return batch

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses of as many prompts as `prompts` has, whose rewards differ; KeepGroupsError after max_batches."""
        size, batch, more = len(prompts), self._given, prompts
        names = {"batch_keys": list(prompts.batch.keys()), "non_tensor_batch_keys": list(prompts.non_tensor_batch)}
        rows: list[tuple[dict[str, Any], int]] = []  # (drawn batch, row) of the prompts that differ
        found: list[DataProto] = []
        for drawn in range(1, self._section.max_batches + 1):
            output, differ = self._sample(batch, more)
            rows += [(batch, int(row)) for row in np.flatnonzero(differ)]
            found.append(output[np.flatnonzero(differ.repeat(len(output) // size))])
            self.report = {"drawn_batches": drawn, "prompts": drawn * size, "differ": len(rows)}
            self.report["kept_share"] = len(rows) / (drawn * size)
            if len(rows) >= size:
                break
            if drawn < self._section.max_batches:
                batch = self._draw()
                more = DataProto.from_single_dict(batch).pop(**names)
        self._workers.end_rollout()
        if len(rows) < size:
            raise KeepGroupsError(self._too_few(size))
        for name in self._given.keys() - {*names["batch_keys"], *names["non_tensor_batch_keys"]}:
            column = [drawn_batch[name][row] for drawn_batch, row in rows[:size]]
            for place, value in enumerate(column):
                self._given[name][place] = value
        return DataProto.concat(found)[: size * (len(output) // size)]

    def _sample(self, batch: dict[str, Any], prompts: DataProto) -> tuple[DataProto, np.ndarray]:
        """(responses of `prompts`, which of them differ in the metric); the columns of `batch` are for their reward."""
        self._on_call("generate_sequences")
        prompts.meta_info[STAYS_AWAKE] = True
        output = self._workers.generate_sequences(prompts)
        self._on_call("reward")
        whole, n = DataProto.from_single_dict(batch), len(output) // len(prompts)
        whole.pop(batch_keys=list(prompts.batch.keys()), non_tensor_batch_keys=list(prompts.non_tensor_batch))
        result = self._trainer.reward_fn(whole.repeat(n, interleave=True).union(output), return_dict=True)
        values, metric = result["reward_tensor"].sum(-1).numpy(), self._section.metric
        if metric != SCORE:
            extra = result.get("reward_extra_info") or {}
            if metric not in extra:
                names = ", ".join(sorted({SCORE, *extra}))
                raise ConfigError(f"recipe.keep_groups.metric is {metric!r}; the reward function gives {names}")
            values = np.asarray(extra[metric], dtype=float)
        values = values.reshape(-1, n)
        return output, values.max(1) > values.min(1)  # exact, where a standard deviation of equal numbers may not be 0

    def _too_few(self, size: int) -> str:
        report, section = self.report, self._section
        return (
            f"recipe.keep_groups: only {report['differ']} of {report['prompts']} prompts ({report['kept_share']:.1%}) "
            f"in {report['drawn_batches']} batches have responses that differ in {section.metric!r}, expected {size} "
            "for the step. The data are too easy or too hard for the model, or all responses are cut at the length "
            "limit: look at the rewards, raise recipe.keep_groups.max_batches or rollout.n, or set "
            "recipe.keep_groups.metric=null"
        )
