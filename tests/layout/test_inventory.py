"""The inventory against the published numbers of DeepSeek-V3 671B, and against transformers' own model.

Golden numbers: DeepSeek-V3's config (huggingface.co/deepseek-ai/DeepSeek-V3) and the 256-die run's table of static
bytes.
"""

import json
import time
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory, read_model_shape
from verl_patches.layout.parallel import ParallelLayout, parse_layout, rollout_layout
from verl_patches.layout.sharding import AXES, LIBRARIES, local_parameters
from verl_patches.layout.static_bytes import static_bytes

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
BIG = build_inventory(MODELS / "deepseekv3_671b.json")
TINY_CONFIG = json.loads((MODELS / "deepseekv3_tiny.json").read_text())
TRAIN = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")


def test_671b_counts_are_exact():
    assert BIG.total == 671_026_419_200
    assert BIG.active == 37_552_297_472
    assert BIG.totals == {
        "embedding": 926_679_040,
        "head": 926_679_040,
        "attention": 61 * 187_107_328,
        "norm": 61 * 2 * 7168 + 7168,
        "router": 58 * (256 * 7168 + 256),  # the correction bias is in the published total
        "dense_mlp": 1_189_085_184,
        "shared_expert": 2_554_331_136,
        "routed_expert": 653_908_770_816,
    }
    assert sum(p.count for p in BIG.experts[3][0]) == 44_040_192
    assert len(BIG.by_name) == len(BIG.parameters) == 45_395


def test_correction_bias_is_fp32_and_not_trained():
    bias = BIG.by_name["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert (bias.dtype, bias.shape, bias.trainable) == ("float32", (256,), False)
    others = [p for p in BIG.parameters if p.kind != "router_bias"]
    assert {p.dtype for p in others} == {"bfloat16"}
    assert all(p.trainable for p in others)


@pytest.mark.slow
def test_names_and_shapes_equal_transformers(run_python):
    """q_lora_rank null is compared with real Megatron and vLLM models instead: transformers 4.51 cannot build it."""
    big = json.loads((MODELS / "deepseekv3_671b.json").read_text())
    changes = [{}, {"first_k_dense_replace": 3}, {"n_shared_experts": 2}]
    configs = [TINY_CONFIG | change for change in changes] + [big | {"num_hidden_layers": 4}]
    code = """if True:
        import json, sys, torch
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
        for config in json.loads(sys.argv[1]):
            with torch.device("meta"):
                model = DeepseekV3ForCausalLM(DeepseekV3Config(**config))
            print(json.dumps({name: list(t.shape) for name, t in model.state_dict().items()}))
    """
    lines = run_python(code, json.dumps(configs)).check().out.splitlines()
    assert len(lines) == len(configs)
    for config, line in zip(configs, lines, strict=True):
        assert {p.name: list(p.shape) for p in build_inventory(config).parameters} == json.loads(line)


def test_variants_of_the_config():
    plain = build_inventory(TINY_CONFIG)
    assert build_inventory(TINY_CONFIG | {"num_nextn_predict_layers": 1}).total == plain.total  # MTP is never counted
    greedy = build_inventory(TINY_CONFIG | {"topk_method": "greedy"})
    assert plain.total - greedy.total == 3 * 16
    assert build_inventory(TINY_CONFIG | {"n_shared_experts": None}).totals["shared_expert"] == 0
    assert build_inventory(read_model_shape(TINY_CONFIG)) == plain


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MODELS / "absent.json", "no such file"),
        (TINY_CONFIG | {"model_type": "llama"}, "found 'llama'"),
        ({"model_type": "deepseek_v3", "hidden_size": 8}, "num_hidden_layers"),
        (TINY_CONFIG | {"tie_word_embeddings": True}, "tie_word_embeddings must be false"),
        (TINY_CONFIG | {"torch_dtype": "int3"}, "torch_dtype"),
    ],
)
def test_other_configs_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build_inventory(config)


# GB of weights, gradients and optimizer state on a die of each stage, as published for the 256-die run
STATIC_GB = {0: (4.79, 9.59, 18.39), 1: (5.93, 11.85, 30.34), 7: (6.39, 12.78, 30.69)}
STATIC_GB |= dict.fromkeys(range(2, 7), (6.77, 13.55, 34.67))


@pytest.mark.parametrize("stage", range(8))
def test_static_bytes_of_the_256_die_run(stage):
    for dp in (0, 7):
        found = static_bytes(BIG, TRAIN, TRAIN.rank_of(pp=stage, dp=dp, tp=3))
        gb = tuple(round(n / 1e9, 2) for n in (found.param_bytes, found.grad_bytes, found.optimizer_bytes))
        assert gb == STATIC_GB[stage]


def test_worst_die_and_swapped_optimizer():
    ranks = [TRAIN.rank_of(pp=stage) for stage in range(8)]
    worst = max(static_bytes(BIG, TRAIN, rank).total_bytes for rank in ranks)
    swapped = [static_bytes(BIG, TRAIN, rank, swap_optimizer=True) for rank in ranks]
    assert round(worst / 1e9, 2) == 54.99
    assert round(max(s.total_bytes for s in swapped) / 1e9, 2) == 20.32
    assert round(max(s.host_bytes for s in swapped) / 1e9, 2) == 34.67


def test_what_tensor_parallelism_leaves_whole():
    """MindSpeed keeps 15,140,864 attention values a layer on every TP rank; Megatron 0.12.2 only the two norms."""
    layer = BIG.layers[3]  # on stage 0
    whole = {}
    for library in LIBRARIES:
        shards = local_parameters(BIG, TRAIN, 0, library).shards
        held = [shards[p.name] for p in layer if p.part == "attention"]
        whole[library] = sum(s.count for s in held if s.axis is None)
    assert whole == {
        "megatron-local": 2048,
        "megatron-te": 2048,
        "mindspeed": 15_140_864,
        "vllm": 15_140_864,
        "vllm-ascend": 15_140_864,
    }


def test_what_a_rollout_die_needs():
    """Published: 25.81 GB for EP256 TP2, of which 20.70 dense (shared experts whole) and 5.11 experts."""
    held = local_parameters(BIG, rollout_layout(1, dp=128, tp=2), 17, "vllm-ascend")
    gb = [round(n / 1e9, 2) for n in (held.size_bytes(False), held.size_bytes(True), held.size_bytes())]
    assert gb == [20.70, 5.11, 25.81]
    split = local_parameters(BIG, rollout_layout(1, dp=128, tp=2), 17, "vllm")
    assert held.size_bytes() - split.size_bytes() == 2 * BIG.totals["shared_expert"] // 2


LAYOUTS = [
    "tp4 pp2 ep2 etp2 @16",
    "tp2 pp2 ep8 etp1 @16",
    "ep16 etp1 @16",
    "tp4 cp2 ep4 etp2 @16",
    "tp2 pp2 vpp2 @4",
    "tp2 pp2 ep4 etp1 @8 layers=1,3",
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("text", LAYOUTS)
def test_shards_of_all_ranks_tile_every_tensor(text, library):
    """Each tensor's rows are held exactly once per replica, over all ranks: nothing lost, nothing doubled."""
    layout, inventory = parse_layout(text), build_inventory(TINY_CONFIG | {"vocab_size": 500})
    pieces = {}
    for rank in range(layout.world_size):
        for name, shard in local_parameters(inventory, layout, rank, library).shards.items():
            pieces.setdefault(name, []).append(shard)
    assert set(pieces) == set(inventory.by_name)
    for name, shards in pieces.items():
        full = shards[0].parameter
        expert = full.expert is not None
        replicas = (layout.edp if expert else layout.dp * layout.cp) * (1 if shards[0].axis is not None else layout.tp)
        axis = shards[0].axis
        rows = [s.start + i for s in shards for i in range(0 if axis is None else s.shape[axis] - s.padding)]
        if axis is None:
            assert len(shards) == replicas * (1 if not expert else layout.etp // layout.tp or 1), name
        else:
            assert sorted(rows) == sorted(list(range(full.shape[axis])) * replicas), name


def test_vllm_pads_the_vocabulary():
    inventory = build_inventory(TINY_CONFIG | {"vocab_size": 500})
    last = local_parameters(inventory, parse_layout("tp4 @4"), 3, "vllm").shards["lm_head.weight"]
    assert (last.shape, last.start, last.padding) == ((128, 128), 384, 12)
    beyond = local_parameters(build_inventory(TINY_CONFIG | {"vocab_size": 60}), parse_layout("tp4 @4"), 3, "vllm")
    assert beyond.shards["lm_head.weight"].shape == (16, 128)
    assert beyond.shards["lm_head.weight"].padding == 4
    unpadded = local_parameters(inventory, parse_layout("tp4 @4"), 3, "megatron-local").shards["lm_head.weight"]
    assert (unpadded.shape, unpadded.start, unpadded.padding) == ((125, 128), 375, 0)


@pytest.mark.parametrize(
    ("text", "library", "change", "message"),
    [
        ("tp2 @2", "torch", {}, "unknown library"),
        ("tp3 @3", "vllm", {}, "num_attention_heads"),
        ("tp4 @4", "megatron-local", {"vocab_size": 510}, "must divide 510"),
        ("tp2 @2", "mindspeed", {"q_lora_rank": None}, "replicated projection"),
        ("etp5 @5", "vllm", {}, "etp=5 must divide 32"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(text, library, change, message):
    with pytest.raises(ConfigError, match=message):
        local_parameters(build_inventory(TINY_CONFIG | change), parse_layout(text), 0, library)


def test_every_kind_has_an_axis_and_numbers_come_fast():
    assert {p.kind for p in BIG.parameters} <= set(AXES)
    started = time.perf_counter()
    local_parameters(
        BIG, ParallelLayout(8, tp=8, etp=8), 0, "vllm"
    ).count()  # the dearest case: all 44,544 expert tensors
    assert time.perf_counter() - started < 1.0
    started = time.perf_counter()
    for rank in range(0, 256, 16):
        local_parameters(BIG, TRAIN, rank, "mindspeed").count()
    assert (time.perf_counter() - started) / 16 < 0.2
