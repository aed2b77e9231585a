"""Test data-parallel rollout with experts over all ranks: groups, lockstep, and the same numbers as without it."""

from __future__ import annotations

import itertools
import socket
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import rollout_layout
from verl_patches.rollout.engine import _hold_address, dp_rank_and_leader, held_ports, set_dp_rank_in_launcher

EP_ALL = {"enable_expert_parallel": True, "data_parallel_size": 2}


def test_a_port_for_all_dp_groups_of_an_engine_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_DP_MASTER_PORT", "29000")
    config = SimpleNamespace(data_parallel_size=2, distributed_executor_backend="external_launcher")
    with pytest.raises(ConfigError, match="VLLM_DP_MASTER_PORT is 29000, expected unset"):
        set_dp_rank_in_launcher(lambda self: None)(config)
    config.data_parallel_size = 1
    set_dp_rank_in_launcher(lambda self: None)(config)


def test_every_rank_is_in_its_group_and_an_uneven_world_is_refused():
    for instances, dp, tp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 8)):
        layout = rollout_layout(instances, dp, tp)
        for group in layout.groups("instance-dp"):
            for position, rank in enumerate(group):
                assert dp_rank_and_leader(rank, layout.world_size, dp, tp) == (position, group[0])
    with pytest.raises(ConfigError, match="data_parallel_size 4 x 2"):
        dp_rank_and_leader(0, 12, 4, 2)


def test_nobody_else_gets_the_port_of_a_dp_group():
    """Bind by number: for port 0 Linux gives out only what such a bind could get too (inet_csk_find_open_port)."""
    ip, port = _hold_address()
    for address in ("", "127.0.0.1", "127.0.0.2"):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
    store = TCPStore(ip, port, 1, True, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
    held_ports.value.pop().close()


@pytest.fixture(scope="module")
def generate(run_rollout, one_rank):
    """Return generate(rounds, tp=1), which returns each rank's findings; `rounds[i][d]` is round i of DP rank d."""

    def run(rounds: list[list[dict]], tp: int = 1, **options) -> list[dict]:
        rollout = {"tensor_model_parallel_size": tp, "load_format": "dummy", "engine_kwargs": {"vllm": EP_ALL}}
        return run_rollout("dp_rank:generate", one_rank["model"], rollout, rounds, size=2 * tp, **options)

    return run


def worst(found: list[dict], expected: dict) -> float:
    """Return the largest difference of log-probs over rounds of several ranks; infinite if a token differs."""
    if [tokens for rank in found for tokens in rank["tokens"]] != expected["tokens"]:
        return float("inf")
    values = [value for rank in found for sequence in rank["logprobs"] for value in sequence]
    return max(abs(a - b) for a, b in zip(values, itertools.chain.from_iterable(expected["logprobs"]), strict=True))


@pytest.fixture(scope="module")
def two_ranks(generate, requests) -> list[dict]:
    """Run two DP ranks: uneven; one without requests; without token exchange; without lockstep (last: it breaks)."""
    parts = (requests[:1], requests[1:])
    lost = {"without": "platform.vllm_dp_lockstep", "stall_s": 5}
    rounds = [
        [{"requests": part} for part in parts],
        [{"requests": []}, {"requests": requests}],
        [{"requests": part, "without": "exchange"} for part in parts],
        [{"requests": part, **lost} for part in parts],
    ]
    return generate(rounds)


@pytest.mark.slow
def test_uneven_ranks_finish_and_agree_with_no_dp(two_ranks, one_rank):
    """Test rows rollout.dp_place and platform.vllm_dp_lockstep; all weights come in memory to every rank."""
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
    """Run a negative control: CpuCommunicator's own dispatch does nothing, so the other rank's experts are lost."""
    assert worst([rank["rounds"][2] for rank in two_ranks], one_rank["generated"]) > 0.01


@pytest.mark.slow
def test_without_lockstep_the_waiting_rank_says_so(two_ranks):
    """Run the control of row platform.vllm_dp_lockstep: no hang, but an error on the rank that still had work."""
    first, second = (rank["rounds"][3] for rank in two_ranks)
    assert len(first["tokens"]) == 1
    assert "rollout DP rank 1 of 2 has sequences to generate, but another rank" in second["error"]


@pytest.mark.slow
def test_without_a_place_ranks_cannot_meet(generate, requests):
    """Run the negative control of row rollout.dp_place: upstream takes both processes for DP rank 0."""
    rounds = [[{"requests": part, "stall_s": 5} for part in (requests[:1], requests[1:])]]
    found = generate(rounds, patches="line=pypi,platform=cpu,-rollout.dp_place")
    assert any("error" in rank["rounds"][0] for rank in found)


@pytest.mark.slow
def test_tp2_in_each_of_two_replicas(generate, one_rank, requests):
    rounds = [[{"requests": requests[:1]}, {"requests": requests[1:]}]]
    found = generate(rounds, tp=2)
    for tp_rank in (0, 1):
        assert worst([rank["rounds"][0] for rank in found[tp_rank::2]], one_rank["generated"]) < 1e-4
    assert [rank["groups"]["dp"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["experts"][0] for rank in found] == [0, 4, 8, 12]
