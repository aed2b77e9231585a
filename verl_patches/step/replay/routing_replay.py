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
import torch.distributed as dist

from verl_patches.current import Current
from verl_patches.errors import ConfigError, RecipeError

_MICRO_BATCH_ATTRIBUTE = "recipe_micro_batch"  # attribute of PackedSeqParams that holds a MicroBatch
_KEY = "recipe.train.routing_replay"
_SELECTION_BONUS = 2.0  # added to a selected expert's score for the selection only: sigmoid scores are between 0 and 1


class MicroBatch:
    """Hold one micro batch of verl's actor: ids and mask [b, S], and the rows of its T packed tokens.

    `experts` [L, T, k] by layer of this rank (uint8, or int16 above 256 experts) is set during recording, or when the
    first layer is replayed; `layers`: the layers recorded so far.
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor, pack: Callable):
        self._ids, self._mask, self._pack = ids, mask.bool(), pack
        self.experts: torch.Tensor | None = None
        self.layers: set[int] = set()

    @functools.cached_property
    def keys(self) -> list[bytes]:
        """Return the sample key of each row."""
        ids, mask = self._ids.cpu(), self._mask.cpu()
        return [sample_key(row[keep]) for row, keep in zip(ids, mask, strict=True)]

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """Return the row of each packed token [T], -1 in padding; the tokens of a row keep their order."""
        numbers = torch.arange(1, len(self._ids) + 1, device=self._ids.device)[:, None].expand_as(self._ids)
        return self._pack(numbers, self._mask, pre_process=True)[0][0] - 1  # verl pads with 0

    def samples(self) -> Iterator[tuple[bytes, torch.Tensor]]:
        """Yield (key, experts [L, n, k]) of each sample."""
        assert self.experts is not None  # set during recording
        for row, key in enumerate(self.keys):
            yield key, self.experts[:, self.rows == row]

    def fill(self, samples: Sequence[torch.Tensor]) -> None:
        """Set `experts` from those of the rows; zero in padding."""
        layers, _, k = samples[0].shape
        self.experts = samples[0].new_zeros(layers, len(self.rows), k)
        for row, experts in enumerate(samples):
            self.experts[:, self.rows == row] = experts


class RoutingReplay:
    """Hold the recorded experts of one step's samples, and run the passes that record or replay them.

    `chunks`: the actor's model chunks, whose layers get hooks; `layers`: numbers (from 1) of the layers with experts.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        moe_layers = [
            layer for chunk in chunks for layer in chunk.modules() if hasattr(getattr(layer, "mlp", None), "router")
        ]
        self.layers = [layer.layer_number for layer in moe_layers]
        self.dtype = torch.uint8  # dtype of the recorded expert ids
        for index, layer in enumerate(moe_layers):
            router = layer.mlp.router
            if router.score_function != "sigmoid" or len(set(self.layers)) < len(moe_layers):
                raise ConfigError(
                    f"{_KEY}: layer {layer.layer_number} scores experts by {router.score_function} (layers: "
                    f"{self.layers}); expected sigmoid, as in DeepSeek-V3, and layers of different numbers"
                )
            if router.config.num_moe_experts > 256:
                self.dtype = torch.int16
            layer.register_forward_pre_hook(functools.partial(self._enter, index), with_kwargs=True)
            layer.register_forward_hook(self._leave, always_call=True)
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
            if batch.layers != set(range(len(self.layers))):
                missing = [self.layers[index] for index in set(range(len(self.layers))) - batch.layers]
                raise RecipeError(
                    f"{_KEY}: layers {missing} did not record the experts of a micro batch; expected each of them to "
                    "call the function that row update.routing_replay wraps: look at `status --run DIR`"
                )
            self.samples.update(batch.samples())
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
        if current_replay.value is not self:
            return
        batch = getattr(kwargs.get("packed_seq_params"), _MICRO_BATCH_ATTRIBUTE, None)
        if batch is None:
            raise RecipeError(
                f"{_KEY}: layer {self.layers[index]} was called without the micro batch of row update.routing_samples; "
                "expected packed sequences of verl's preprocess_packed_seqs: look at `status --run DIR`"
            )
        self._running_layer = index, batch

    def _leave(self, layer: torch.nn.Module, args: tuple, output: Any) -> None:
        self._running_layer = None

    def select(self, upstream: Callable, logits: torch.Tensor, topk: int, options: Mapping[str, Any]) -> Any:
        """Return the result of `upstream` (topk_softmax_with_capacity of either line) for the recorded experts.

        logits [N, E] are of this rank's tokens: all T, or a tensor-parallel rank's share of them in order.
        """
        if self._running_layer is None:
            raise RecipeError(
                f"{_KEY}: a router ran outside its layer, as where only the experts' part of a layer is recomputed; "
                "expected recomputation of whole layers (activations_checkpoint_granularity=full) or none"
            )
        index, batch = self._running_layer
        if self._is_recording:
            result = upstream(logits, topk, **options)
            self._record_experts(index, batch, chosen_experts(result[1], topk))
            return result
        with torch.no_grad():
            own = chosen_experts(upstream(logits, topk, **options)[1], topk)
            experts, real = self._recorded_experts(index, batch, len(logits))
            self._count_equal(own, experts, real)
            chosen = torch.where(real[:, None], experts, own)
            bias = torch.zeros_like(logits).scatter_(1, chosen, _SELECTION_BONUS)
        return upstream(logits, topk, **{**options, "expert_bias": bias, "num_groups": None, "group_topk": None})

    def _record_experts(self, index: int, batch: MicroBatch, experts: torch.Tensor) -> None:
        experts = experts.to(self.dtype)
        if len(experts) != len(batch.rows):
            share, _ = _tensor_parallel_share(len(batch.rows), len(experts))
            parts = [torch.empty_like(experts) for _ in range(share.size())]
            dist.all_gather(parts, experts.contiguous(), group=share)
            experts = torch.cat(parts)
        if batch.experts is None:
            batch.experts = experts.new_zeros(len(self.layers), *experts.shape)
            self._micro_batches.append(batch)
        batch.experts[index] = experts
        batch.layers.add(index)

    def _recorded_experts(self, index: int, batch: MicroBatch, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (experts [N, k] int64, which tokens are not padding [N])."""
        if batch.experts is None:
            missing = [key for key in batch.keys if key not in self.samples]
            if missing:
                raise RecipeError(
                    f"{_KEY}: {len(missing)} of {len(batch.keys)} samples of a micro batch have no recorded experts on "
                    f"this rank, which recorded {len(self.samples)} samples; expected the update to have the samples "
                    "of the pass for old log-probs, each on the same rank"
                )
            batch.fill([self.samples[key] for key in batch.keys])
            assert batch.experts is not None  # `fill` has set them
        mine = slice(None)
        if tokens != len(batch.rows):
            _, mine = _tensor_parallel_share(len(batch.rows), tokens)
        return batch.experts[index, mine].long(), batch.rows[mine] >= 0

    def _count_equal(self, own: torch.Tensor, experts: torch.Tensor, real: torch.Tensor) -> None:
        equal = (own[:, :, None] == experts[:, None, :]).any(-1) & real[:, None]
        counts = torch.stack([equal.sum(), real.sum() * own.shape[1]])
        self._counts = counts if self._counts is None else self._counts + counts


current_replay: Current[RoutingReplay | None] = Current(None)  # the replay of the pass in progress


def sample_key(ids: torch.Tensor) -> bytes:
    """Return the key of a sample from its tokens, prompt and response without padding; on the host."""
    return hashlib.blake2b(ids.to(torch.int64).numpy().tobytes(), digest_size=16).digest()


def chosen_experts(selected: torch.Tensor, topk: int) -> torch.Tensor:
    """Return [N, k] int64 from a bool map [N, E] (Megatron 0.12.2), or unchanged indices (MindSpeed-LLM)."""
    return selected.int().topk(topk, dim=1).indices if selected.dtype == torch.bool else selected


def _tensor_parallel_share(tokens: int, share: int) -> tuple[Any, slice]:
    """Return (tensor-parallel group, this rank's slice) of packed tokens that sequence parallelism splits."""
    from megatron.core import parallel_state as mpu

    group, rank = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_rank()
    if share * group.size() != tokens:
        raise RecipeError(
            f"{_KEY}: a router got {share} tokens of a micro batch of {tokens}; expected all of them or one of "
            f"{group.size()} tensor-parallel shares"
        )
    return group, slice(rank * share, (rank + 1) * share)


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
    def select(logits: torch.Tensor, topk: int, *args: Any, **options: Any) -> Any:
        replay = current_replay.value
        if replay is None:
            return topk_softmax_with_capacity(logits, topk, *args, **options)
        if args:
            raise RecipeError(f"{_KEY}: topk_softmax_with_capacity got {len(args)} options by position; use keywords")
        return replay.select(topk_softmax_with_capacity, logits, topk, options)

    return select
