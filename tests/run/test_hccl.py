"""Test HCCL settings: the buffer by the documented formula, timeouts, and ports that nothing else uses."""

import functools
import re
from dataclasses import replace

import pytest

from tests.family import KIMI_K2, MOONLIGHT
from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.platform.npu.machine import HARDWARE
from verl_patches.run import hccl
from verl_patches.run.environment import environment_variables
from verl_patches.run.resolve import changed_run

CONFIGS = {name: f"deepseekv3_256die_{name}" for name in ("random_init", "true_weight")}
VLLM = "actor_rollout_ref__rollout__engine_kwargs__vllm"
SEATS, ASCEND = f"{VLLM}__max_num_seqs", "recipe__rollout__ascend"
SIZE = "actor_rollout_ref__actor__megatron__{}_parallel_size".format
ALONE = {"recipe__rollout__instances": 128, "recipe__rollout__data_parallel_size": 1}
NODE = {"trainer__nnodes": 1, "trainer__n_gpus_per_node": 8}
NODE |= {"recipe__rollout__instances": 1, "recipe__rollout__data_parallel_size": 4}
NODE |= {SIZE("pipeline_model"): 2, SIZE("expert_model"): 4, "recipe__train__layers_per_stage": [31, 30]}
composed_once = functools.cache(composed)


def composed_run(name="true_weight", **changes):
    """Return one of the two runs, composed once; `changes` have two underscores for a dot."""
    run = composed_once(CONFIGS[name], ("level=tuned",))
    return changed_run(run, {key.replace("__", "."): value for key, value in changes.items()})


def variables(**changes):
    return {v.name: v.value for v in environment_variables(composed_run(**changes))}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_need_of_both_layouts_by_the_formula_written_out(name):
    # 2^20 (B - 2) / 2 >= 32 tokens x 2 bytes x (7168 + 128) x (256 experts of the group + top 8 + 1), so B >= 238.02
    assert 32 * 2 * (7168 + 128) * (256 + 8 + 1) == 123_740_160
    run = composed_run(name)
    assert hccl.buffer_need_mib(run) == 239 and hccl.buffer_mib(run) == 300
    # and above the plain size of the tokens in and out, ep x batch x hidden x 4 bytes x local experts
    assert 32 * 256 * 7168 * 4 / 2**20 == 224


@pytest.mark.parametrize(
    ("overrides", "need"),
    [
        ({SEATS: 32, f"{ASCEND}__graph_batch_sizes": [64]}, 239),  # batches are padded to the largest graph
        ({SEATS: None, f"{ASCEND}__graphs": False}, 947),
        ({"recipe__rollout__enable_expert_parallel": False, **ALONE}, 0),
        (NODE, 0),  # MC2 needs at least 16 ranks
    ],
)
def test_the_need_follows_the_largest_decode_batch(overrides, need):
    assert hccl.buffer_need_mib(composed_run(**overrides)) == need


def test_a_buffer_below_the_need_is_refused_with_the_need_and_the_variable():
    for given in (200, 238, 239, 300):
        check = hccl.check_buffer(composed_run(recipe__hccl__buffer_mib=given))
        assert check.ok is (given >= 239) and "239" in check.detail and "HCCL_BUFFSIZE" in check.detail
        assert check.ok or check.detail.startswith(f"recipe.hccl.buffer_mib is {given}")
        assert variables(recipe__hccl__buffer_mib=given)["HCCL_BUFFSIZE"] == str(given)


def test_the_groups_that_communicate_and_their_memory():
    """Check controls too: with one size for all groups sums differ; without expert parallelism a group is idle."""
    run = composed_run()
    used = {True: [], False: []}  # groups by whether they have small buffers
    for group in hccl.hccl_groups(run):
        if group.communicates:
            used[group.small].append((group.side, group.name, group.ranks))
    train = [("train", *group) for group in (("dp_cp", 8), ("mp", 32), ("tp", 4), ("pp", 8))]
    assert used[True] == [*train, *(("rollout", f"vllm_{name}", n) for name, n in (("tp", 2), ("dp", 64), ("ep", 128)))]
    train = [("train", "all ranks", 256), ("train", "tp_exp", 32)]
    rollout = (("verl's mesh, tp", 2), ("vllm_mc2", 128), ("unfinished requests", 64))
    assert used[False] == [*train, *(("rollout", *group) for group in rollout)]
    mib = {"train": 2 * 300 + 4 * 64, "rollout": 3 * 300 + 3 * 64}
    assert hccl.buffer_bytes(run) == {side: 2 * size * 2**20 for side, size in mib.items()}
    alike = hccl.buffer_bytes(composed_run(recipe__hccl__small_groups_mib=None))
    assert alike == {"train": 2 * 6 * 300 * 2**20, "rollout": 2 * 6 * 300 * 2**20}
    # without expert parallelism MC2 has no group
    idle = hccl.hccl_groups(composed_run(recipe__rollout__enable_expert_parallel=False, **ALONE))
    found = [(g.name, g.communicates) for g in idle if g.name in ("vllm_ep", "vllm_mc2")]
    assert found == [("vllm_ep", False)]


def test_experts_over_a_part_of_a_tp_group_are_refused():
    with pytest.raises(ConfigError, match="expert_model_parallel_size is 2.* 4"):
        hccl.hccl_groups(composed_run(actor_rollout_ref__actor__megatron__expert_model_parallel_size=2))


def test_the_timeout_of_a_collective_must_be_possible_in_the_expansion_mode():
    minutes = "recipe__train__distributed_timeout_minutes"
    assert hccl.check_timeouts(composed_run()).ok and hccl.check_timeouts(composed_run(**{minutes: 19})).ok
    for given, words in ((20, "expected at most 19"), (1, "expected at least 2")):
        check = hccl.check_timeouts(composed_run(**{minutes: given}))
        assert not check.ok and f"distributed_timeout_minutes is {given} " in check.detail and words in check.detail
    assert hccl.check_timeouts(composed_run(**{minutes: 20}, recipe__hccl__expansion_mode="AI_CPU")).ok


def test_hccl_times_out_before_the_watchdog_of_torchs_groups():
    run = composed_run()
    assert int(variables()["HCCL_EXEC_TIMEOUT"]) == 60 * run.recipe.train.distributed_timeout_minutes - 60 == 1020


@pytest.mark.parametrize(
    ("base", "kernel", "words"),
    [
        (61000, {}, None),
        (60000, {}, "32768 to 60999 are this machine's ephemeral ports"),
        (60900, {"reserved": "8080,60900-60999"}, None),
        (19990, {}, "Ray's workers 10002 to 19999"),
    ],
)
def test_ports_are_those_that_nothing_else_uses(tmp_path, base, kernel, words):
    (tmp_path / "ip_local_port_range").write_text(kernel.get("ports", "32768\t60999") + "\n")
    (tmp_path / "ip_local_reserved_ports").write_text(kernel.get("reserved", "") + "\n")
    check = hccl.check_ports(composed_run(recipe__hccl__base_port=base), tmp_path)
    assert check.ok is (words is None) and (words or f"ports {base} to {base + 143}") in check.detail
    assert check.ok or "recipe.hccl.base_port" in check.detail


NODE_800T = {"recipe__hardware": "800t_a2", "trainer__nnodes": 32, "trainer__n_gpus_per_node": 8}
NODE_800T |= {"recipe__rollout__data_parallel_size": 32, "recipe__rollout__instances": None}
NODE_800T["recipe__hccl__expansion_mode"] = "HOST"


def test_a2_has_no_port_range_because_mc2_does_not_support_it():
    names = hccl.IF_BASE_PORT, hccl.HOST_PORTS
    found = [[variables(**changes).get(name) for name in names] for changes in ({}, NODE_800T)]
    assert found == [["61000", "61032-61143"], ["61000", None]]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        (NODE_800T, None),
        ({**NODE_800T, "trainer__nnodes": 16, "trainer__n_gpus_per_node": 16}, "is 16, expected at most 8: set .*=32 "),
        ({"recipe__hccl__expansion_mode": "HOST"}, "expansion_mode is HOST, expected AIV or AI_CPU"),
        (
            {**NODE_800T, "recipe__rollout__data_parallel_size": 64},
            "has 128 ranks, MC2 allows 16, 32, 64: change recipe.rollout.data_parallel_size",
        ),
        ({**NODE_800T, SEATS: 1024}, "decodes 512 tokens, MC2 allows 256"),
    ],
)
def test_the_machine_has_such_nodes_and_takes_what_is_asked_of_hccl_and_mc2(changes, fault):
    check = hccl.check_machine(composed_run(**changes))
    assert check.ok == (fault is None) and re.search(fault or "dies of a node of", check.detail), check.detail


def shape_with(model, sizes):
    """Return a ModelShape with those of `sizes` that it has."""
    return replace(model, **{key: value for key, value in sizes.items() if hasattr(model, key)})


NARROW = "hidden size is 2048, MC2 allows 7168: set recipe.rollout.enable_expert_parallel=false"


@pytest.mark.parametrize(
    ("hardware", "model", "ranks", "fault"),
    [
        ("a3", MOONLIGHT, 16, NARROW),
        ("800t_a2", MOONLIGHT, 16, None),
        ("800t_a2", MOONLIGHT | {"hidden_size": 2064}, 16, "is 2064, MC2 allows multiples of 32 up to 7168"),
        ("a3", KIMI_K2, 64, None),
        ("a3", KIMI_K2, 96, "has 96 ranks, MC2 allows 8, 16, 32, 64, 128, 144, 256, 288"),
        ("a3", KIMI_K2 | {"num_experts_per_tok": 9}, 64, "a token has 9 experts, MC2 allows 8"),
        ("a3", KIMI_K2 | {"n_routed_experts": 768}, 64, "a layer has 768 experts, MC2 allows 512"),
        ("800t_a2", KIMI_K2 | {"n_routed_experts": 400}, 16, "a rank has 25 experts, MC2 allows 24"),
    ],
)
def test_mc2_takes_the_sizes_of_a_machine(hardware, model, ranks, fault):
    faults = hccl.mc2_faults(HARDWARE[hardware].mc2, shape_with(composed_run().model, model), ranks, tokens=64)
    assert len(faults) == (fault is not None) and (fault or "") in "".join(faults)


def test_the_need_of_a2_by_its_own_formula():
    # 2 x (32 tokens x 64 ranks x min(4 experts, top 8) x 7168 x 2 bytes + 2 MiB), in MiB
    assert 2 * (32 * 64 * 4 * 7168 * 2 / 2**20 + 2) == 228
    assert hccl.buffer_need_mib(composed_run(**NODE_800T)) == 228
    assert hccl.buffer_need_mib(composed_run(**{**NODE_800T, "recipe__hardware": "a3"})) == 239


@pytest.mark.parametrize(("name", "instance"), [("random_init", 256), ("true_weight", 128)])
def test_mc2_has_a_group_of_its_own_beside_that_of_the_experts_of_an_instance(name, instance):
    """Check controls too: none below 16 ranks or without expert parallelism, where the EP group keeps its buffer."""

    def experts(**changes):
        groups = hccl.hccl_groups(composed_run(name, **changes))
        return [(g.name, g.ranks, g.small) for g in groups if g.name in ("vllm_ep", "vllm_mc2")]

    assert experts() == [("vllm_ep", instance, True), ("vllm_mc2", instance, False)]
    assert experts(**ALONE, recipe__rollout__enable_expert_parallel=False) == [("vllm_ep", 2, False)]
    assert experts(**NODE) == [("vllm_ep", 8, False)]


def test_groups_of_context_parallelism():
    """Check that MindSpeed and Megatron each make a second group for the experts' gradients under CP."""
    changes = {SIZE("context"): 2, SIZE("expert_model"): 16, SIZE("pipeline_model"): 4}
    run = composed_run(**changes, recipe__train__layers_per_stage=[15, 16, 15, 15])  # TP4 PP4 CP2 DP8
    found = [(g.name, g.ranks, g.communicates) for g in hccl.hccl_groups(run) if g.name.startswith("dp_modulo")]
    assert found == [
        ("dp_modulo_exp", 8, False),
        ("dp_modulo_exp_cp", 16, False),
        ("dp_modulo_exp", 4, False),
        ("dp_modulo_exp_cp", 4, True),
    ]
