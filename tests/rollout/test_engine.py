"""vLLM's engine as verl builds it: arguments, router, MLA's projections; DP ranks in step, equal to one rank."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import PretrainedConfig

from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import rollout_layout
from verl_patches.rollout.engine import dp_rank_of, llm_arguments, refresh_absorbed_mla, route_in_fp32


def test_image_arguments_go_only_without_a_limit():
    """Row rollout.llm_arguments; with a real LLM: tests/platform/test_cpu_vllm.py."""
    seen = []
    init = llm_arguments(lambda self, **kwargs: seen.append(kwargs))
    init(None, model="m", quantization="ascend", limit_mm_per_prompt=None, disable_mm_preprocessor_cache=True)
    init(None, model="m", quantization="ascend", limit_mm_per_prompt={"image": 1}, disable_mm_preprocessor_cache=True)
    plain, kept = {"model": "m", "quantization": "ascend"}, {"limit_mm_per_prompt": {"image": 1}}
    assert seen == [plain, {**plain, **kept, "disable_mm_preprocessor_cache": True}]


@pytest.mark.parametrize("asked", [None, {"n_group": 1}, lambda found: found.update({"n_group": 1}) or found])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "other"])
def test_the_model_view_comes_before_the_callers_own_overrides(asked, model_type):
    seen = []
    llm_arguments(lambda self, **kwargs: seen.append(kwargs))(None, model="m", hf_overrides=asked)
    found = PretrainedConfig(quantization_config={"quant_method": "fp8"}, n_group=4)
    found.model_type = model_type
    found = seen[0]["hf_overrides"](found)
    assert hasattr(found, "quantization_config") == (model_type == "other")
    assert found.n_group == (4 if asked is None else 1)


def test_the_router_works_in_fp32():
    """Row rollout.fp32_router; in a real bf16 engine: tests/rollout/test_parity.py."""
    layer = torch.nn.Module()
    layer.gate = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    layer.gate.e_score_correction_bias = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    bias, tokens = layer.gate.e_score_correction_bias, torch.randn(3, 8, dtype=torch.bfloat16)
    rounded = layer.gate(tokens)
    route_in_fp32(lambda self: None)(layer)
    assert layer.gate.e_score_correction_bias is bias and bias.dtype is torch.float32
    exact = layer.gate(tokens)
    assert rounded.dtype is torch.bfloat16 and exact.dtype is torch.float32
    assert torch.equal(exact, tokens.float() @ layer.gate.weight.T) and not torch.equal(exact, rounded.float())


class Absorbing:
    """MLA of one layer as vLLM and vllm-ascend derive its projections from kv_b_proj [N * (P + V), L]."""

    heads, nope, value, latent = 2, 3, 4, 5

    def __init__(self, copies: bool):
        self.copies, self.impl = copies, SimpleNamespace()
        self.kv_b_proj = torch.zeros(self.heads * (self.nope + self.value), self.latent)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        weight = self.kv_b_proj.T.view(self.latent, self.heads, self.nope + self.value)
        up_key, up_value = weight.split([self.nope, self.value], dim=-1)
        self.impl.W_UV, self.impl.W_UK_T = up_value.transpose(0, 1), up_key.permute(1, 2, 0)
        if self.copies:  # vllm_ascend/attention/mla_v1.py:669
            self.impl.W_UV, self.impl.W_UK_T = self.impl.W_UV.contiguous(), self.impl.W_UK_T.contiguous()


def _decoder(copies: bool):
    """(load, layers, attention of the one layer that this stage holds)."""
    attention = Absorbing(copies)
    layers = [None, SimpleNamespace(self_attn=SimpleNamespace(mla_attn=attention)), None]
    model = SimpleNamespace(model=SimpleNamespace(layers=layers, start_layer=1, end_layer=2))

    def load_weights(self, seed):
        attention.kv_b_proj.copy_(torch.randn(attention.kv_b_proj.shape, generator=torch.Generator().manual_seed(seed)))
        return {"kv_b_proj"}

    return model, load_weights, attention


def _derived(attention: Absorbing) -> dict[str, torch.Tensor]:
    fresh = Absorbing(copies=True)
    fresh.kv_b_proj = attention.kv_b_proj
    fresh.process_weights_after_loading(torch.float32)
    return vars(fresh.impl)


@pytest.mark.parametrize("copies", [True, False])
def test_absorbed_projections_follow_new_weights_at_their_old_addresses(copies):
    """Row rollout.absorb_mla_again; in a real engine, with a control: tests/loop/test_a3_smoke.py."""
    model, load_weights, attention = _decoder(copies)
    load = refresh_absorbed_mla(load_weights)
    assert load(model, 0) == {"kv_b_proj"}
    assert vars(attention.impl) == {}  # the first load: vLLM derives them when it has all weights
    attention.process_weights_after_loading(torch.float32)
    captured = dict(vars(attention.impl))  # what a graph reads
    places = {name: tensor.data_ptr() for name, tensor in captured.items()}
    load(model, 1)
    assert {name: tensor.data_ptr() for name, tensor in vars(attention.impl).items()} == places
    for name, expected in _derived(attention).items():
        assert torch.equal(getattr(attention.impl, name), expected) and torch.equal(captured[name], expected)


def test_without_the_row_copies_would_stay_at_the_first_weights():
    model, load_weights, attention = _decoder(copies=True)
    load_weights(model, 0)
    attention.process_weights_after_loading(torch.float32)
    captured = dict(vars(attention.impl))
    load_weights(model, 1)
    assert not torch.equal(captured["W_UV"], _derived(attention)["W_UV"])
    attention.process_weights_after_loading(torch.float32)  # upstream's own way: a graph would go on with the old ones
    assert attention.impl.W_UV is not captured["W_UV"]
    assert not torch.equal(captured["W_UV"], _derived(attention)["W_UV"])


EP_ALL = {"enable_expert_parallel": True, "data_parallel_size": 2}


def test_every_rank_finds_its_group():
    for instances, dp, tp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 8)):
        layout = rollout_layout(instances, dp, tp)
        for group in layout.groups("instance-dp"):
            for position, rank in enumerate(group):
                assert dp_rank_of(rank, layout.world_size, dp, tp) == (position, group[0])


def test_mission_layouts_have_one_leader_a_group():
    leaders = {dp_rank_of(rank, 256, 64, 2)[1] for rank in range(256)}  # true weights: 2 instances x DP64 TP2
    assert leaders == {0, 1, 128, 129}


def test_uneven_world_is_refused():
    with pytest.raises(ConfigError, match="data_parallel_size 4 x 2"):
        dp_rank_of(0, 12, 4, 2)


def dp_specs(model: str, rounds: list[list[dict]], tp: int = 1) -> list[dict]:
    """One spec a rank: `rounds[i][d]` is round i of DP rank d."""
    rollout = {"tensor_model_parallel_size": tp, "load_format": "dummy", "engine_kwargs": {"vllm": EP_ALL}}
    common = {"code": "dp_rank:generate", "model": model, "rollout": rollout}
    return [{**common, "rounds": [one[rank // tp] for one in rounds]} for rank in range(2 * tp)]


def worst(found: list[dict], expected: dict) -> float:
    """Largest difference of log-probs over rounds of several ranks; infinite if a token differs."""
    if [tokens for one in found for tokens in one["tokens"]] != expected["tokens"]:
        return float("inf")
    mine = itertools.chain.from_iterable(itertools.chain.from_iterable(one["logprobs"] for one in found))
    return max(abs(a - b) for a, b in zip(mine, itertools.chain.from_iterable(expected["logprobs"]), strict=True))


@pytest.fixture(scope="module")
def two_ranks(run_ranks, one_rank, requests) -> list[dict]:
    """Two DP ranks: uneven; one without requests; without exchange of tokens; without lockstep (last: it breaks)."""
    rounds = [
        [{"requests": requests[:1]}, {"requests": requests[1:]}],
        [{"requests": []}, {"requests": requests}],
        [{"requests": part, "without": "exchange"} for part in (requests[:1], requests[1:])],
        [{"requests": part, "without": "platform.vllm_dp_lockstep", "stall_s": 5}
         for part in (requests[:1], requests[1:])],
    ]
    return run_ranks(dp_specs(one_rank["model"], rounds))


@pytest.mark.slow
def test_uneven_ranks_finish_and_agree_with_no_dp(two_ranks, one_rank):
    """Rows rollout.dp_place and platform.vllm_dp_lockstep; weights come in memory, all to every rank."""
    first, second = (rank["rounds"][0] for rank in two_ranks)
    assert worst([first, second], one_rank["generated"]) < 1e-4
    assert first["passes"] == {"all": 26, "own": 4}  # 22 dummy passes while the longest of the other rank runs
    assert second["passes"] == {"all": 26, "own": 26}


@pytest.mark.slow
def test_experts_are_split_over_dp(two_ranks):
    first, second = two_ranks
    assert first["groups"] == {"dp": [0, 1], "tp": [0], "ep": [0, 1]}
    assert second["groups"] == {"dp": [0, 1], "tp": [1], "ep": [0, 1]}
    assert (first["experts"], second["experts"]) == (list(range(8)), list(range(8, 16)))


@pytest.mark.slow
def test_rank_without_requests_takes_part(two_ranks, one_rank):
    first, second = (rank["rounds"][1] for rank in two_ranks)
    assert worst([first, second], one_rank["generated"]) < 1e-4
    assert first["passes"] == {"all": 26, "own": 0}


@pytest.mark.slow
def test_without_exchange_the_numbers_are_wrong(two_ranks, one_rank):
    """Negative control: with CpuCommunicator's own dispatch, which does nothing, the other rank's experts are lost."""
    assert worst([rank["rounds"][2] for rank in two_ranks], one_rank["generated"]) > 0.01


@pytest.mark.slow
def test_without_lockstep_the_waiting_rank_says_so(two_ranks):
    """Negative control of row platform.vllm_dp_lockstep: no hang, but an error on the rank that still had work."""
    first, second = (rank["rounds"][3] for rank in two_ranks)
    assert len(first["tokens"]) == 1
    assert "rollout DP rank 1 of 2 has sequences to generate, but another rank" in second["error"]


@pytest.mark.full
def test_without_a_place_ranks_cannot_meet(run_ranks, one_rank, requests):
    """Negative control of row rollout.dp_place: upstream takes both processes for DP rank 0."""
    specs = dp_specs(one_rank["model"], [[{"requests": part, "stall_s": 5} for part in (requests[:1], requests[1:])]])
    found = run_ranks(specs, patches="line=pypi,platform=cpu,-rollout.dp_place")
    assert any("error" in rank["rounds"][0] for rank in found)


@pytest.mark.full
def test_tp2_in_each_of_two_replicas(run_ranks, one_rank, requests):
    rounds = [[{"requests": requests[:1]}, {"requests": requests[1:]}]]
    found = run_ranks(dp_specs(one_rank["model"], rounds, tp=2), timeout_s=240)
    for tp_rank in (0, 1):
        assert worst([rank["rounds"][0] for rank in found[tp_rank::2]], one_rank["generated"]) < 1e-4
    assert [rank["groups"]["dp"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["experts"][0] for rank in found] == [0, 4, 8, 12]
