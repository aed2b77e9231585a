"""Replay routing (recipe.train.routing_replay=R2): the update selects the experts of the pass for old log-probs.

Only the selection is replayed. Gates are computed from the router's own scores of the recorded experts, normalised and
scaled as upstream does, so gradients reach the router. The counts for the correction bias are those of the replayed
experts. The reference routes by itself.

    MicroBatch            tells which token of which sample each packed token is; upstream's PackedSeqParams carries it,
                          so a recomputed layer finds the micro batch of its own forward pass
    RoutingReplay         holds recorded experts by sample, and replaces the routers' selection; hooks on the actor's
                          layers tell which layer runs
    attach_micro_batch    wraps verl's preprocess_packed_seqs: makes the MicroBatch
    replay_experts        wraps the selection of experts on either line

Samples are identified by their tokens, so rows may change places between passes. Each pipeline stage has its own
layers. Under tensor parallelism every rank has all tokens of its replica. Context parallelism is refused, as a rank
would record only a part of each micro batch.

Paper: Zheng et al., "Stabilizing Reinforcement Learning with LLMs" (2025).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl_patches.current import Current
from verl_patches.errors import RecipeError

_MICRO_BATCH_ATTRIBUTE = "recipe_micro_batch"  # attribute of PackedSeqParams that holds a MicroBatch
_KEY = "recipe.train.routing_replay"
_SELECTION_BONUS = 2.0  # added to a selected expert's score for the selection only: sigmoid scores are between 0 and 1


class MicroBatch:
    """Hold one micro batch of verl's actor: the sample keys of its rows, and the rows of its T packed tokens.

    `rows` [T]: -1 in padding; the tokens of a row keep their order. `experts`: [T, k] by layer of this rank, set
    during recording, or when the first layer is replayed.
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor, pack: Callable):
        self.keys = [sample_key(row[keep]) for row, keep in zip(ids.cpu(), mask.bool().cpu(), strict=True)]
        numbers = torch.arange(1, len(ids) + 1, device=ids.device)[:, None].expand_as(ids)
        self.rows = pack(numbers, mask.bool(), pre_process=True)[0][0] - 1  # verl pads with 0
        self.experts: dict[int, torch.Tensor] = {}


class RoutingReplay:
    """Hold the recorded experts of one step's samples, and run the passes that record or replay them.

    `chunks`: the actor's model chunks, whose layers get hooks; `layers`: numbers (from 1) of the layers with experts.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        moe_layers = [
            layer for chunk in chunks for layer in chunk.modules() if hasattr(getattr(layer, "mlp", None), "router")
        ]
        self.layers = [layer.layer_number for layer in moe_layers]
        for index, layer in enumerate(moe_layers):
            layer.register_forward_pre_hook(functools.partial(self._enter, index), with_kwargs=True)
            layer.register_forward_hook(self._leave, always_call=True)
        wide = any(layer.mlp.router.config.num_moe_experts > 256 for layer in moe_layers)
        self._dtype = torch.int16 if wide else torch.uint8  # dtype of the recorded expert ids
        self.samples: dict[bytes, torch.Tensor] = {}  # experts [L, n, k] by sample key
        self._is_recording = False
        self._micro_batches: list[MicroBatch] = []
        self._running_layer: tuple[int, MicroBatch] | None = None
        self._counts: torch.Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run a forward pass of the actor inside; record the experts of its samples afterwards."""
        self._is_recording, self._micro_batches = True, []
        with current_replay.set(self):
            yield
        for batch in self._micro_batches:
            if len(batch.experts) < len(self.layers):
                raise RecipeError(
                    f"{_KEY}: {len(batch.experts)} of {len(self.layers)} layers recorded the experts of a micro batch; "
                    "expected each to call the function of row update.routing_replay: look at `status --run DIR`"
                )
            experts = torch.stack([batch.experts[index] for index in range(len(self.layers))])
            self.samples |= {key: experts[:, batch.rows == row] for row, key in enumerate(batch.keys)}
        self._micro_batches = []

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Run passes of the actor inside, with their recomputation, on the recorded experts."""
        self._is_recording = False
        with current_replay.set(self):
            yield

    def end_step(self) -> dict[str, Any]:
        """Drop the recorded experts; return the counts that `replay_totals` (trainer/step_record.py) adds up.

        of: experts replayed; equal: those that routers chose too; bytes: of the recorded experts.
        """
        recorded_bytes = sum(experts.nbytes for experts in self.samples.values())
        equal, of = (0, 0) if self._counts is None else self._counts.tolist()
        self._counts, self.samples = None, {}
        return {"equal": equal, "of": of, "bytes": recorded_bytes}

    # ---- called by hooks and rows inside a pass

    def _enter(self, index: int, layer: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if current_replay.value is self:
            self._running_layer = index, getattr(kwargs["packed_seq_params"], _MICRO_BATCH_ATTRIBUTE)

    def _leave(self, layer: torch.nn.Module, args: tuple, output: Any) -> None:
        self._running_layer = None

    def select(self, upstream: Callable, logits: torch.Tensor, topk: int, *args: Any, **options: Any) -> Any:
        """Return the result of `upstream` (topk_softmax_with_capacity of either line) for the recorded experts.

        logits [N, E] are of this rank's tokens: all T, or a tensor-parallel rank's share of them in order.
        """
        from megatron.core.tensor_parallel import mappings

        if self._running_layer is None:
            raise RecipeError(
                f"{_KEY}: a router ran outside its layer, as where only the experts' part of a layer is recomputed; "
                "expected recomputation of whole layers (activations_checkpoint_granularity=full) or none"
            )
        index, batch = self._running_layer
        is_whole = len(logits) == len(batch.rows)
        result = upstream(logits, topk, *args, **options)
        own = result[1]  # expert ids [N, k] (MindSpeed-LLM), or a map [N, E] (Megatron 0.12.2)
        if own.dtype == torch.bool:
            own = own.int().topk(topk, dim=1).indices
        if self._is_recording:
            whole = own if is_whole else mappings.gather_from_sequence_parallel_region(own, False)
            if not batch.experts:
                self._micro_batches.append(batch)
            batch.experts[index] = whole.to(self._dtype)
            return result
        with torch.no_grad():
            if not batch.experts:
                self._fill(batch)
            experts, rows = batch.experts[index].long(), batch.rows
            if not is_whole:
                experts, rows = map(mappings.scatter_to_sequence_parallel_region, (experts, rows))
            real = rows[:, None] >= 0  # not padding
            equal = (own[:, :, None] == experts[:, None, :]).any(-1) & real
            counts = torch.stack([equal.sum(), real.sum() * topk])
            self._counts = counts if self._counts is None else self._counts + counts
            bias = torch.zeros_like(logits).scatter_(1, torch.where(real, experts, own), _SELECTION_BONUS)
        options |= {"expert_bias": bias, "num_groups": None, "group_topk": None}
        return upstream(logits, topk, *args, **options)

    def _fill(self, batch: MicroBatch) -> None:
        """Set the experts of a micro batch from those of its samples; zero in padding."""
        if missing := [key for key in batch.keys if key not in self.samples]:
            raise RecipeError(
                f"{_KEY}: {len(missing)} of {len(batch.keys)} samples of a micro batch have no recorded experts on "
                f"this rank, which recorded {len(self.samples)} samples; expected the update to have the samples "
                "of the pass for old log-probs, each on the same rank"
            )
        first = self.samples[batch.keys[0]]
        experts = first.new_zeros(len(first), len(batch.rows), first.shape[2])
        for row, key in enumerate(batch.keys):
            experts[:, batch.rows == row] = self.samples[key]
        batch.experts = dict(enumerate(experts))


current_replay: Current[RoutingReplay | None] = Current(None)  # the replay of the pass in progress


def sample_key(ids: torch.Tensor) -> bytes:
    """Return the key of a sample from its tokens, prompt and response without padding; on the host."""
    return hashlib.blake2b(ids.to(torch.int64).numpy().tobytes(), digest_size=16).digest()


def attach_micro_batch(preprocess_packed_seqs: Callable) -> Callable:
    """Wrap verl's preprocess_packed_seqs: in a recorded or replayed pass its PackedSeqParams carry the sample ids."""

    @functools.wraps(preprocess_packed_seqs)
    def preprocess(input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        packed, params = preprocess_packed_seqs(input_ids, attention_mask, *args, **kwargs)
        if current_replay.value is not None:
            setattr(params, _MICRO_BATCH_ATTRIBUTE, MicroBatch(input_ids, attention_mask, preprocess_packed_seqs))
        return packed, params

    return preprocess


def replay_experts(topk_softmax_with_capacity: Callable) -> Callable:
    """Wrap the selection of experts: use `RoutingReplay.select` inside its passes, else upstream's own."""

    @functools.wraps(topk_softmax_with_capacity)
    def select(*args: Any, **options: Any) -> Any:
        replay = current_replay.value
        if replay is None:
            return topk_softmax_with_capacity(*args, **options)
        return replay.select(topk_softmax_with_capacity, *args, **options)

    return select
