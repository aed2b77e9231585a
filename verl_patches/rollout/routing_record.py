"""Routed experts of what vLLM's engine V0 generates, for recipe.train.routing_replay=R3.

    hooks on the experts' modules   select again, by vLLM's own function, from the logits that the module gets
    prepare_model_input             says which token of which sequence each row of the next forward pass is
    take                            the experts of all sequences since the last call

A sequence's last token has no forward pass and so no experts. Tokens that the engine does not compute, as with a prefix
cache, would have none either: `take` refuses such sequences. One engine, in this process; nothing upstream is replaced
but `prepare_model_input` of its model runner.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_patches.errors import RecipeError

_KEY = "recipe.train.routing_replay=R3"


class RoutingRecorder:
    """Experts by sequence; `model_runner` is that of vLLM's worker, `layers` L of its model have k experts a token."""

    def __init__(self, model_runner: Any):
        from vllm.model_executor.layers.fused_moe.layer import FusedMoE

        found = [module for module in model_runner.model.modules() if isinstance(module, FusedMoE)]
        if not found or max(module.global_num_experts for module in found) > 256:
            raise RecipeError(f"{_KEY}: {len(found)} layers with experts; expected one or more, of at most 256 experts")
        self.layers, self.k = len(found), found[0].top_k
        for index, module in enumerate(found):
            module.register_forward_pre_hook(functools.partial(self._select, index), with_kwargs=True)
        prepare = model_runner.prepare_model_input

        @functools.wraps(prepare)
        def prepare_and_note(seq_group_metadata_list: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            prepared = prepare(seq_group_metadata_list, *args, **kwargs)
            self._begin_pass(seq_group_metadata_list, len(prepared.input_tokens))
            return prepared

        model_runner.prepare_model_input = prepare_and_note
        self._pass: torch.Tensor | None = None  # [T, L, k] of the forward pass in progress
        self._rows: list[tuple[int, int, int]] = []  # its (sequence, first place, tokens)
        self._data: dict[int, Any] = {}  # {sequence: vLLM's SequenceData}
        self._parts: dict[int, list[tuple[int, torch.Tensor]]] = {}  # {sequence: [(first place, [t, L, k])]}

    def _begin_pass(self, groups: Sequence[Any], tokens: int) -> None:
        self._end_pass()
        for group in groups:
            for number, data in group.seq_data.items():
                if group.block_tables.get(number) is None:
                    continue  # a pass without a sequence: another data-parallel rank works
                first, count = data.get_len() - 1, 1
                if group.is_prompt:
                    first, count = data.get_num_computed_tokens(), group.token_chunk_size
                self._rows.append((number, first, count))
                self._data[number] = data
        if not self._rows:
            return
        if sum(count for _, _, count in self._rows) != tokens:
            raise RecipeError(
                f"{_KEY}: a forward pass has {tokens} tokens, its sequences {sum(row[2] for row in self._rows)}; "
                "expected equally many, as without prefix cache and draft tokens"
            )
        self._pass = torch.zeros(tokens, self.layers, self.k, dtype=torch.uint8)

    def _select(self, index: int, module: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if self._pass is None:
            return
        hidden, logits = args if args else (kwargs["hidden_states"], kwargs["router_logits"])
        _, experts = module.select_experts(
            hidden_states=hidden,
            router_logits=logits,
            top_k=module.top_k,
            use_grouped_topk=module.use_grouped_topk,
            renormalize=module.renormalize,
            topk_group=module.topk_group,
            num_expert_group=module.num_expert_group,
            custom_routing_function=module.custom_routing_function,
            scoring_func=module.scoring_func,
            e_score_correction_bias=module.e_score_correction_bias,
        )
        self._pass[:, index] = experts.to(self._pass)

    def _end_pass(self) -> None:
        at = 0
        for number, first, count in self._rows:
            self._parts.setdefault(number, []).append((first, self._pass[at : at + count]))
            at += count
        self._pass, self._rows = None, []

    def take(self) -> dict[tuple[int, ...], torch.Tensor]:
        """{ids of prompt and response: experts [n - 1, L, k] uint8} of the sequences since the last call."""
        self._end_pass()
        found = {}
        for number, parts in self._parts.items():
            data = self._data[number]
            ids = (*data.prompt_token_ids, *data.output_token_ids)
            experts = torch.zeros(len(ids) - 1, self.layers, self.k, dtype=torch.uint8)
            seen = torch.zeros(len(ids) - 1, dtype=torch.bool)
            for first, part in parts:
                experts[first : first + len(part)] = part
                seen[first : first + len(part)] = True
            if not seen.all():
                raise RecipeError(
                    f"{_KEY}: {int((~seen).sum())} of {len(ids)} tokens of a sequence were not computed here; expected "
                    "all but the last, as without prefix cache"
                )
            found[ids] = experts
        self._parts, self._data = {}, {}
        return found

    def column(self, requests: Sequence[Any], attention_mask: torch.Tensor, responses: int) -> torch.Tensor:
        """The column EXPERTS (log_probs.py) of vLLM's `requests`, in order.

        attention_mask [B, S]: of prompts, padded on the left, and `responses` places.
        """
        taken, prompt_width = self.take(), attention_mask.shape[1] - responses
        column = torch.zeros(*attention_mask.shape, self.layers * self.k, dtype=torch.uint8)
        samples = [(request, sample) for request in requests for sample in request.outputs]
        for row, (request, sample) in enumerate(samples):
            experts = taken[(*request.prompt_token_ids, *sample.token_ids)].flatten(1)
            first = prompt_width - len(request.prompt_token_ids)
            column[row, first : first + len(experts)] = experts
        return column.to(attention_mask.device)
