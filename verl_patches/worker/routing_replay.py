"""Routing replay (recipe.train.routing_replay): a token goes to the experts that were recorded for it.

    R2   recorded in the actor's pass for old log-probs, replayed in the update
    R3   recorded by the rollout engine, replayed in both

Only the selection is replayed. Gates are computed from the router's own scores of the recorded experts, normalised and
scaled as upstream does, so gradients reach the router. The correction bias's counts are of the replayed experts. The
reference routes by itself.

    MicroBatch       which token of which sample each packed token is; upstream's PackedSeqParams carries it, so a
                     recomputed layer finds the micro batch of its own forward pass
    RoutingReplay    recorded experts by sample, and what routers do; hooks on the actor's layers say which layer runs
    note_samples     row provider for verl's preprocess_packed_seqs: makes the MicroBatch
    replay_experts   row provider for the selection of experts of either line

Samples are identified by their tokens, so rows may change places between passes. Each pipeline stage has its own
layers. Under tensor parallelism every rank has all tokens of its replica, under context parallelism those of its part.
Papers: R2, Zheng et al., "Stabilizing Reinforcement Learning with LLMs" (2025); R3, arXiv 2510.11370.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.rollout.log_probs import EXPERTS
from verl_patches.trainer import rollout_correction
from verl_patches.worker.context import context
from verl_patches.worker.on_policy_update import is_metrics_rank

_CARRIED = "recipe_micro_batch"  # attribute of PackedSeqParams
_KEY = "recipe.train.routing_replay"
_SELECTED = 2.0  # added to a selected expert's score for the selection only: sigmoid scores are between 0 and 1


@dataclass(frozen=True)
class Recorded:
    """Experts of one sample: `experts` [L, n, k] (uint8, or int16 above 256 experts), by layer of this rank and token.

    `known` [n] bool: tokens for which there are any; the router's own choice is used for the others.
    """

    experts: torch.Tensor
    known: torch.Tensor


class MicroBatch:
    """One micro batch of verl's actor: ids and mask [b, S], and their places among T packed tokens.

    `experts` [L, T, k] and `known` [T] are set while it is recorded, or when its first layer is replayed.
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor, pack: Callable):
        self._ids, self._mask, self._pack = ids, mask.bool(), pack
        self.experts: torch.Tensor | None = None
        self.known: torch.Tensor | None = None
        self.layers: set[int] = set()

    @functools.cached_property
    def keys(self) -> list[bytes]:
        """One for each row."""
        ids, mask = self._ids.cpu(), self._mask.cpu()
        return [sample_key(row[keep]) for row, keep in zip(ids, mask, strict=True)]

    @functools.cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, place in the sample) of each packed token of this rank's context-parallel part, -1 in padding; [T]."""
        numbers = torch.arange(1, self._ids.numel() + 1, device=self._ids.device).view(self._ids.shape)
        packed = self._pack(numbers, self._mask, pre_process=True)[0][0] - 1  # verl pads with 0
        padding, width = packed < 0, self._ids.shape[1]
        place = (self._mask.long().cumsum(1) - 1).flatten()[packed.clamp(min=0)]
        return (packed // width).masked_fill(padding, -1), place.masked_fill(padding, -1)

    @property
    def tokens(self) -> int:
        """T, with padding."""
        return len(self.places[0])

    def samples(self) -> Iterator[tuple[bytes, Recorded]]:
        """What was recorded, by sample."""
        row, place = self.places
        for number, key in enumerate(self.keys):
            here = row == number
            experts = self.experts.new_zeros(
                self.experts.shape[0], int(self._mask[number].sum()), *self.experts.shape[2:]
            )
            known = torch.zeros(experts.shape[1], dtype=torch.bool, device=experts.device)
            experts[:, place[here]] = self.experts[:, here]
            known[place[here]] = True
            yield key, Recorded(experts, known)

    def fill(self, found: Sequence[Recorded]) -> None:
        """Set `experts` and `known` from the samples of the rows."""
        row, place = self.places
        layers, _, k = found[0].experts.shape
        self.experts = torch.zeros(layers, self.tokens, k, dtype=found[0].experts.dtype, device=row.device)
        self.known = torch.zeros(self.tokens, dtype=torch.bool, device=row.device)
        for number, sample in enumerate(found):
            here = row == number
            self.experts[:, here] = sample.experts.to(row.device)[:, place[here]]
            self.known[here] = sample.known.to(row.device)[place[here]]


class RoutingReplay:
    """Recorded experts of the samples of one step, and the passes that record or replay them.

    `chunks`: the actor's model chunks, whose layers get hooks; `layers`: numbers (from 1) of those with experts.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        found = [
            layer for chunk in chunks for layer in chunk.modules() if hasattr(getattr(layer, "mlp", None), "router")
        ]
        self.layers = [layer.layer_number for layer in found]
        self.experts = self.topk = self._model_layers = 0
        for index, layer in enumerate(found):
            router = layer.mlp.router
            if router.score_function != "sigmoid" or len(set(self.layers)) < len(found):
                raise ConfigError(
                    f"{_KEY}: layer {layer.layer_number} scores experts by {router.score_function} (layers: "
                    f"{self.layers}); expected sigmoid, as in DeepSeek-V3, and layers of different numbers"
                )
            self.experts, self.topk = router.config.num_moe_experts, router.topk
            self._model_layers = router.config.num_layers
            layer.register_forward_pre_hook(functools.partial(self._enter, index), with_kwargs=True)
            layer.register_forward_hook(self._leave, always_call=True)
        self.samples: dict[bytes, Recorded] = {}
        self._records = False
        self._micro_batches: list[MicroBatch] = []
        self._now: tuple[int, MicroBatch] | None = None
        self._counts: torch.Tensor | None = None
        self._passes = 0
        self._control: rollout_correction.Moments | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of recorded experts."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A forward pass of the actor runs inside; afterwards its samples are recorded."""
        self._records, self._micro_batches = True, []
        with self._active():
            yield
        for batch in self._micro_batches:
            if batch.layers != set(range(len(self.layers))):
                missing = [self.layers[index] for index in set(range(len(self.layers))) - batch.layers]
                raise RecipeError(
                    f"{_KEY}: layers {missing} of a micro batch did not select experts; see status --run DIR"
                )
            self.samples.update(batch.samples())
        self._micro_batches = []

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Passes of the actor that run inside, with their recomputation, use what is recorded."""
        self._records = False
        with self._active():
            yield

    @contextmanager
    def replaying_log_probs(self, actor: Any, control_every: int | None) -> Iterator[None]:
        """`replaying` around the pass for old log-probs of verl's `actor`.

        Every N-th time, from the first on, the actor first computes them without replay, and the difference to the
        rollout's is stored for `end_step`. Replaces the method on this object only, inside.
        """
        self._passes += 1
        with self.replaying():
            if control_every is None or (self._passes - 1) % control_every:
                yield
                return
            inner, own = actor.compute_log_prob, vars(actor).get("compute_log_prob")

            def compute(data: Any, *args: Any, **kwargs: Any) -> Any:
                self._compute_control(actor, data, *args, **kwargs)
                return inner(data, *args, **kwargs)

            actor.compute_log_prob = compute
            try:
                yield
            finally:
                if own is None:
                    del actor.compute_log_prob
                else:
                    actor.compute_log_prob = own

    def _compute_control(self, actor: Any, data: Any, *args: Any, **kwargs: Any) -> None:
        context().routing = None
        try:
            same = type(data)(batch=data.batch, meta_info=data.meta_info)
            log_probs, _ = type(actor).compute_log_prob(actor, same, *args, **kwargs)
        finally:
            context().routing = self
        if is_metrics_rank():
            mask = data.batch["attention_mask"][:, -log_probs.shape[1] :]
            self._control = rollout_correction.moments(data.batch["rollout_log_probs"], log_probs, mask)

    @contextmanager
    def _active(self) -> Iterator[None]:
        context().routing = self
        try:
            yield
        finally:
            context().routing, self._now = None, None

    def take_column(self, batch: Any) -> None:
        """Move the rollout's experts out of verl's `batch`, if it has them: EXPERTS [B, S, L * k] of all layers."""
        if EXPERTS in batch.keys():
            self.add(batch["input_ids"], batch["attention_mask"].bool(), batch.pop(EXPERTS))

    def add(self, ids: torch.Tensor, mask: torch.Tensor, experts: torch.Tensor) -> None:
        """Record `experts` [B, S, L * k] of the rollout, whose L layers are the model's last."""
        if not self.layers:
            return  # a stage of dense layers
        mine = [number - 1 - (self._model_layers - experts.shape[2] // self.topk) for number in self.layers]
        hosted, valid = ids.cpu(), mask.cpu()
        for row in range(len(ids)):
            found = experts[row][mask[row]]
            known = torch.ones(len(found), dtype=torch.bool, device=experts.device)
            known[-1] = False  # sampled last: the rollout has never computed it
            by_layer = found.view(len(found), -1, self.topk).transpose(0, 1)[mine].contiguous()
            self.samples[sample_key(hosted[row][valid[row]])] = Recorded(by_layer, known)

    def end_step(self) -> dict[str, Any]:
        """Drop what is recorded; returns what `replay_of_step` (trainer/run.py) adds up.

        of: experts replayed; equal: those that routers chose too; bytes: of the record; control: moments of log-probs
        without replay, None where this rank has none.
        """
        held = sum(sample.experts.nbytes + sample.known.nbytes for sample in self.samples.values())
        equal, of = (0, 0) if self._counts is None else self._counts.tolist()
        control, self._counts, self._control, self.samples = self._control, None, None, {}
        return {"equal": equal, "of": of, "bytes": held, "control": control}

    # ---- called by hooks and rows inside a pass

    def _enter(self, index: int, layer: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if context().routing is not self:
            return
        batch = getattr(kwargs.get("packed_seq_params"), _CARRIED, None)
        if batch is None:
            raise RecipeError(
                f"{_KEY}: layer {self.layers[index]} was called without the micro batch of row update.routing_samples; "
                "expected packed sequences of verl's preprocess_packed_seqs: look at `status --run DIR`"
            )
        self._now = index, batch

    def _leave(self, layer: torch.nn.Module, args: tuple, output: Any) -> None:
        self._now = None

    def select(self, upstream: Callable, logits: torch.Tensor, topk: int, options: Mapping[str, Any]) -> Any:
        """What `upstream` (topk_softmax_with_capacity of either line) returns, for the recorded experts.

        logits [N, E] of this rank's tokens: all T, or a tensor-parallel rank's share of them in order.
        """
        if self._now is None:
            raise RecipeError(
                f"{_KEY}: a router ran outside its layer, as where only the experts' part of a layer is recomputed; "
                "expected recomputation of whole layers (activations_checkpoint_granularity=full) or none"
            )
        index, batch = self._now
        if self._records:
            result = upstream(logits, topk, **options)
            self._record(index, batch, chosen_experts(result[1], topk))
            return result
        with torch.no_grad():
            own = chosen_experts(upstream(logits, topk, **options)[1], topk)
            experts, known = self._recorded(index, batch, len(logits))
            self._count(own, experts, known)
            chosen = torch.where(known[:, None], experts, own)
            bias = torch.zeros_like(logits).scatter_(1, chosen, _SELECTED)
        return upstream(logits, topk, **{**options, "expert_bias": bias, "num_groups": None, "group_topk": None})

    def _record(self, index: int, batch: MicroBatch, experts: torch.Tensor) -> None:
        experts = experts.to(self.dtype)
        if len(experts) != batch.tokens:
            share, _ = _tensor_parallel_share(batch.tokens, len(experts))
            parts = [torch.empty_like(experts) for _ in range(share.size())]
            dist.all_gather(parts, experts.contiguous(), group=share)
            experts = torch.cat(parts)
        if batch.experts is None:
            batch.experts = experts.new_zeros(len(self.layers), *experts.shape)
            self._micro_batches.append(batch)
        batch.experts[index] = experts
        batch.layers.add(index)

    def _recorded(self, index: int, batch: MicroBatch, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(experts [N, k] int64, known [N])."""
        if batch.experts is None:
            missing = [key for key in batch.keys if key not in self.samples]
            if missing:
                raise RecipeError(
                    f"{_KEY}: {len(missing)} of {len(batch.keys)} samples of a micro batch have no recorded experts, "
                    f"{len(self.samples)} samples have; expected the samples of the pass that recorded, on their ranks"
                )
            batch.fill([self.samples[key] for key in batch.keys])
        mine = slice(None)
        if tokens != batch.tokens:
            _, mine = _tensor_parallel_share(batch.tokens, tokens)
        return batch.experts[index, mine].long(), batch.known[mine]

    def _count(self, own: torch.Tensor, experts: torch.Tensor, known: torch.Tensor) -> None:
        equal = (own[:, :, None] == experts[:, None, :]).any(-1) & known[:, None]
        counts = torch.stack([equal.sum(), known.sum() * own.shape[1]])
        self._counts = counts if self._counts is None else self._counts + counts


def sample_key(ids: torch.Tensor) -> bytes:
    """The key of a sample from its tokens, prompt and response without padding; on the host."""
    return hashlib.blake2b(ids.to(torch.int64).numpy().tobytes(), digest_size=16).digest()


def chosen_experts(selected: torch.Tensor, topk: int) -> torch.Tensor:
    """[N, k] int64 from a map [N, E] of bool (Megatron 0.12.2), or from indices as they are (MindSpeed-LLM)."""
    return selected.int().topk(topk, dim=1).indices if selected.dtype == torch.bool else selected


def _tensor_parallel_share(tokens: int, share: int) -> tuple[Any, slice]:
    """(tensor-parallel group, this rank's slice) of packed tokens that sequence parallelism splits."""
    from megatron.core import parallel_state as mpu

    group, rank = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_rank()
    if share * group.size() != tokens:
        raise RecipeError(
            f"{_KEY}: a router got {share} tokens of a micro batch of {tokens}; expected all of them or one of "
            f"{group.size()} tensor-parallel shares"
        )
    return group, slice(rank * share, (rank + 1) * share)


def note_samples(preprocess_packed_seqs: Callable) -> Callable:
    """Row provider for verl's preprocess_packed_seqs: in a recorded or replayed pass its PackedSeqParams carry ids."""

    @functools.wraps(preprocess_packed_seqs)
    def preprocess(input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        packed, params = preprocess_packed_seqs(input_ids, attention_mask, *args, **kwargs)
        if context().routing is not None:
            setattr(params, _CARRIED, MicroBatch(input_ids, attention_mask, preprocess_packed_seqs))
        return packed, params

    return preprocess


def replay_experts(topk_softmax_with_capacity: Callable) -> Callable:
    """Row provider for the selection of experts: inside a pass of `RoutingReplay` its `select`, else upstream's own."""

    @functools.wraps(topk_softmax_with_capacity)
    def select(logits: torch.Tensor, topk: int, *args: Any, **options: Any) -> Any:
        replay = context().routing
        if replay is None:
            return topk_softmax_with_capacity(logits, topk, *args, **options)
        if args:
            raise RecipeError(f"{_KEY}: topk_softmax_with_capacity got {len(args)} options by position; expected names")
        return replay.select(topk_softmax_with_capacity, logits, topk, options)

    return select
