"""Make random small models and layouts, HF folders with and without FP8, and the expected value of each tensor."""

import json
import random
import shutil

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import SCORE, build_inventory, read_model_shape
from verl_patches.layout.model_folder import INDEX, QUANTIZATION
from verl_patches.layout.parallel import ParallelLayout, parse_layout
from verl_patches.model.tiny import tiny_config
from verl_patches.weights.convert import convert
from verl_patches.weights.manifest import Manifest, in_data_order, whole_entry
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.reader import DTYPE_NAMES, tensor_bytes
from verl_patches.weights.run_folders import CHECKPOINTS, take_start
from verl_patches.weights.source import open_source
from verl_patches.weights.writer import complete_folder, write_bytes, write_tensors

NOT_IN_FP8 = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SMALL = tiny_config() | {"num_hidden_layers": 2, "n_routed_experts": 6, "n_group": 1, "topk_group": 1}
SMALL_LAYOUT = parse_layout("tp2 pp2 ep6 etp1 @12 layers=1,1")


def as_value_model(model, folder, word):
    """Copy a causal LM's folder as HF's ...ForSequenceClassification, whose head is a token's; return the head."""
    shutil.copytree(model, folder)
    index = json.loads((folder / INDEX).read_text())
    file = folder / index["weight_map"].pop("lm_head.weight")
    index["weight_map"][SCORE] = file.name
    (folder / INDEX).write_text(json.dumps(index))
    tensors = load_file(file)
    score = tensors[SCORE] = tensors.pop("lm_head.weight")[word : word + 1].clone()
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["DeepseekV3ForSequenceClassification"]})
    )
    return score


def run(source, destination, layout=None, dtype=None, file_bytes=100_000, line="a3", **more):
    """Convert a folder to Megatron's checkpoint of a layout, or to a HF folder."""
    plan = plan_conversion(open_source(source), layout, dtype, file_bytes, line)
    return convert(plan, destination, **{"processes": 1, **more})


def random_case(seed):
    """Draw (config, layout, another layout): uneven layers, any number of experts, optional q_lora, bias, shared."""
    draw = random.Random(seed)
    tp = draw.choice([1, 2, 4])
    etp = draw.choice([1, tp])
    heads, experts = tp * draw.choice([1, 2, 3]), draw.choice([4, 6, 10, 12])
    layers = draw.randint(2, 5)
    config = tiny_config() | {
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw.randint(0, layers),
        "moe_layer_freq": draw.choice([1, 1, 2]),
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": draw.choice([0, 1, 2]),
        "hidden_size": draw.choice([32, 64, 144]),
        "intermediate_size": draw.choice([48, 160]),
        "moe_intermediate_size": draw.choice([16, 144]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice([None, 24, 64]),
        "kv_lora_rank": draw.choice([8, 40]),
        "vocab_size": draw.choice([136, 320]),
        "topk_method": draw.choice(["noaux_tc", "noaux_tc", "greedy"]),
    }
    return config, random_layout(draw, layers, experts, tp, etp), random_layout(draw, layers, experts, 1, 1)


def random_layout(draw, layers, experts, tp, etp):
    """Draw a layout that the model fits, with uneven stages."""
    while True:
        pp = draw.randint(1, min(3, layers))
        ends = sorted(draw.choices(range(layers + 1), k=pp - 1))
        stages = [stop - start for start, stop in zip([0, *ends], [*ends, layers], strict=True)]
        ep = draw.choice([n for n in range(1, experts + 1) if experts % n == 0])
        world = pp * tp * draw.choice([1, 2, 3, 6])
        try:
            return ParallelLayout(world, tp=tp, pp=pp, ep=ep, etp=etp, layers_per_stage=tuple(stages))
        except ConfigError:
            continue


def make_folder(folder, config, seed=0, files=2, tensors=None):
    """Make a HF folder of random weights (bf16, the correction bias fp32) in `files` files; return its tensors."""
    generator = torch.Generator().manual_seed(seed)
    if tensors is None:
        tensors = {}
        for parameter in build_inventory(config).parameters:
            value = torch.randn(parameter.shape, generator=generator)
            tensors[parameter.name] = value if parameter.kind == "router_bias" else value.bfloat16()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    store(folder, tensors, files)
    return tensors


def store(folder, tensors, files=2):
    """Write tensors in turns to `files` files, and the index."""
    names = [f"model-{n + 1}.safetensors" for n in range(files)]
    where = {name: names[number % files] for number, name in enumerate(tensors)}
    for file in names:
        save_file({name: t for name, t in tensors.items() if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def rewrite(folder, change):
    """Store the folder's tensors again, in the files of `make_folder`, after `change` has changed their dict."""
    tensors = read_folder(folder)
    change(tensors)
    store(folder, tensors)


def in_fp8(tensors):
    """Return tensors as DeepSeek stores them, by its own formulas one block at a time, and their bf16 values."""
    stored, values = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or any(word in name for word in NOT_IN_FP8):
            stored[name] = values[name] = tensor
            continue
        blocks = -(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)
        scales, fp8 = torch.empty(blocks), torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        value = torch.empty(tensor.shape, dtype=torch.bfloat16)
        for row in range(blocks[0]):
            for column in range(blocks[1]):
                at = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
                block = tensor[at].float()
                scales[row, column] = block.abs().max() / 448
                fp8[at] = (block / scales[row, column]).to(torch.float8_e4m3fn)
                value[at] = (fp8[at].float() * scales[row, column]).bfloat16()
        stored[name], stored[f"{name}_scale_inv"], values[name] = fp8, scales, value
    return stored, values


def copy_in_fp8(model, folder):
    """Copy a HF folder with its weights in FP8."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {QUANTIZATION: QUANTIZED}))
    store(folder, in_fp8(read_folder(model))[0])


def make_fp8_folder(folder, config, seed=0, files=2):
    """Make a HF folder in FP8; return (the stored tensors, their bf16 values)."""
    plain = make_folder(folder / "plain", config, seed)
    stored, values = in_fp8(plain)
    make_folder(folder / "fp8", config | {QUANTIZATION: QUANTIZED}, seed, files, stored)
    return stored, values


def read_folder(folder):
    """Read all tensors of a folder's safetensors files by safetensors alone; no name may be in two files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def is_same(found, expected):
    """Return whether two dicts of tensors are equal bit for bit, dtypes too."""
    return found.keys() == expected.keys() and all(_same(found[name], expected[name]) for name in expected)


def _same(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and numpy.array_equal(_bytes(a), _bytes(b))


def _bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def make_checkpoint(folder, step, **facts):
    """Make a complete checkpoint folder/global_step_N with one tensor."""
    facts = {"step": step, "line": "pypi", "digest": "d", "settings": {}, **facts}
    return write_checkpoint(folder / f"global_step_{step}", {"w": torch.zeros(4)}, tiny_config(), facts)


def make_start(home, steps=(), parent=None, source=None):
    """Make the folder of a new start of the run `home`, with checkpoints of these steps."""
    folder = home / take_start([home], parent, source)
    for step in steps:
        make_checkpoint(folder / CHECKPOINTS, step)
    return folder


def write_checkpoint(folder, weights, config, facts):
    """Write a checkpoint of one rank with these whole weights; without weights it has no file of the rank."""
    entries = [whole_entry(f"weight/{n}", DTYPE_NAMES[t.dtype], t.shape, name=n) for n, t in weights.items()]
    tensors = "rank_00000.safetensors"
    texts = {"config.json": json.dumps(config), "tokenizer.json": "{}"}
    names = (tensors, *texts) if weights else tuple(texts)
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        write_tensors(folder, tensors, in_data_order(entries), lambda entry: [tensor_bytes(weights[entry.region.name])])
    for name, text in texts.items():
        write_bytes(folder, name, text.encode())
    complete_folder(folder, Manifest(read_model_shape(config), "@1", "bf16", "x", names, facts=facts))
    return folder
