"""Test Megatron checkpoints of other programs: MindSpeed-LLM's converters, training, and harmful pickles."""

import argparse
import importlib.util
import os
import pickle
import shutil
import sys
import types
import zipfile
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from tests.weights.cases import SMALL, SMALL_LAYOUT, is_same, make_folder, read_folder, run
from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import MTP_LAYERS
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.tiny import tiny_config
from verl_patches.weights.manifest import LAYOUT_FILE, TRACKER
from verl_patches.weights.megatron import ITERATION_FOLDER, MODEL_FILE, crc_problems
from verl_patches.weights.source import open_source

CONFIG = tiny_config()
WHOLE = {"moe_tp_extend_ep": True}
CASES = {  # our layout -> sizes of MindSpeed-LLM's converter
    "tp2 pp2 ep4 etp1 @8": {"tp_size": 2, "pp_size": 2, "ep_size": 2, **WHOLE},
    "tp2 ep2 @4": {"tp_size": 2, "ep_size": 2},
    "pp2 vpp2 ep2 @4": {"pp_size": 2, "ep_size": 2, "vpp_stage": 1},
    "ep2 @2": {"ep_size": 2},
}


@pytest.fixture
def converter(a3_sources, monkeypatch):
    """Return converter(name), MindSpeed-LLM's script of that name with the tiny model's sizes in place of 671B's."""
    (source,) = a3_sources("MindSpeed-LLM")

    def load(name):
        for absent in ("bitsandbytes", "torch_npu"):  # imported for QLoRA and for the device, not called
            monkeypatch.setitem(sys.modules, absent, types.ModuleType(absent))
        spec = importlib.util.spec_from_file_location(name, source / f"examples/mcore/deepseek3/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sizes = ("hidden_size", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for size in (*sizes, "q_lora_rank", "first_k_dense_replace"):
            setattr(module, size.upper(), CONFIG[size])
        module.NUM_EXPERTS, module.MTP_LAYER_INDEX = CONFIG["n_routed_experts"], CONFIG["num_hidden_layers"]
        return module

    return load


def options(layers=CONFIG["num_hidden_layers"], **sizes):
    dense = CONFIG["first_k_dense_replace"]
    return {"num_layers": layers, "num_dense_layers": dense, "moe_grouped_gemm": True, **sizes}


def with_small_files(folder, source, layout):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, folder / name)
    (folder / LAYOUT_FILE).write_text(layout)
    return folder


@pytest.mark.parametrize("text", CASES)
def test_mindspeeds_converters_and_ours_read_and_write_the_same(tmp_path, converter, text):
    sizes, hf = CASES[text], tmp_path / "hf"
    tensors = make_folder(hf, CONFIG)
    converter("convert_ckpt_deepseek3").CkptConvert(str(hf), str(tmp_path / "theirs"), **options(**sizes)).run()
    run(hf, tmp_path / "ours", parse_layout(text))
    files = sorted(path.relative_to(tmp_path / "theirs") for path in (tmp_path / "theirs").rglob(MODEL_FILE))
    assert files == sorted(path.relative_to(tmp_path / "ours") for path in (tmp_path / "ours").rglob(MODEL_FILE)) != []
    for file in files:
        theirs = torch.load(tmp_path / "theirs" / file, weights_only=False)
        ours = torch.load(tmp_path / "ours" / file, weights_only=True)
        models = [key for key in theirs if key.startswith("model")]
        assert models and all(is_same(ours[key], theirs[key]) for key in models)
        with pytest.raises(pickle.UnpicklingError):  # so Unpickler reads them
            torch.load(tmp_path / "theirs" / file, weights_only=True)
    with_small_files(tmp_path / "theirs", hf, text)
    run(tmp_path / "theirs", tmp_path / "back")
    assert is_same(read_folder(tmp_path / "back"), tensors)
    names = {"mg_model_path": str(tmp_path / "ours"), "hf_save_path": str(tmp_path / "their back")}
    converter("convert_ckpt_deepseek3_mcore2hf").MgCkptConvert(**names, **options(**sizes)).run()
    assert is_same(read_folder(tmp_path / "their back"), tensors)


def test_layers_that_do_nothing_and_those_of_mtp_are_left_out(tmp_path, converter):
    """Check MindSpeed's recipe for 671B: noop layers make stages equal, and the last stage has a layer of MTP."""
    plain, layer = make_folder(tmp_path / "plain", CONFIG), CONFIG["num_hidden_layers"]
    of_last = f"model.layers.{layer - 1}."
    more = {n.replace(of_last, f"model.layers.{layer}."): t.clone() for n, t in plain.items() if n.startswith(of_last)}
    hidden, head = CONFIG["hidden_size"], plain["lm_head.weight"]
    norms = {name: torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    matrices = {"eh_proj": torch.ones(hidden, 2 * hidden), "embed_tokens": head, "shared_head.head": head}
    for name, tensor in (norms | matrices).items():
        more[f"model.layers.{layer}.{name}.weight"] = tensor.bfloat16().clone()
    make_folder(tmp_path / "hf", CONFIG | {MTP_LAYERS: 1}, tensors=plain | more)
    sizes = options(layer + 2, pp_size=2, ep_size=2, noop_layers="2,5", num_nextn_predict_layers=1)
    convert = converter("convert_ckpt_deepseek3").CkptConvert(str(tmp_path / "hf"), str(tmp_path / "theirs"), **sizes)
    convert.run()
    folder = with_small_files(tmp_path / "theirs", tmp_path / "hf", "pp2 ep2 @4")
    source = open_source(folder)
    assert "mtp_layers.0.enorm.weight" in source.left_out
    run(folder, tmp_path / "back")
    assert is_same(read_folder(tmp_path / "back"), plain)


# ---- files as training writes them, without upstream's sources


@pytest.fixture
def folder(tmp_path):
    """Make a folder of ours, whose files `resave` changes."""
    make_folder(tmp_path / "hf", SMALL)
    run(tmp_path / "hf", tmp_path / "megatron", SMALL_LAYOUT)
    return tmp_path / "megatron"


def resave(folder, change, **more):
    """Store each file again, as torch.save does, after `change` of its content."""
    for path in folder.rglob(MODEL_FILE):
        state = torch.load(path, weights_only=True)
        torch.save(change(state) or state, path, **more)


def as_trained(args):
    """Return a change to the content of Megatron's save_checkpoint: arguments, generators, state_dict's own entries."""

    def change(state):
        model = defaultdict(dict, state["model"]) | {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
        generators = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]
        args.params_dtype = torch.bfloat16
        more = {"args": args, "rng_state": generators, "optimizer": OrderedDict(state=torch.nn.Linear(1, 1))}
        return {**state, "model": model, **more}

    return change


def test_a_folder_that_training_wrote_is_read(tmp_path, folder):
    resave(folder, as_trained(argparse.Namespace(moe_tp_extend_ep=True)), pickle_protocol=4)
    run(folder, tmp_path / "back")
    assert is_same(read_folder(tmp_path / "back"), read_folder(tmp_path / "hf"))


def test_a_folder_that_does_not_say_how_it_holds_experts_is_not_guessed(tmp_path, folder):
    text = (folder / LAYOUT_FILE).read_text()
    (folder / LAYOUT_FILE).unlink()
    with pytest.raises(ConfigError, match="expected the layout of the folder's files, found no file"):
        open_source(folder)
    (folder / LAYOUT_FILE).write_text(text.replace("ep6 etp1", "ep3 etp2"))
    run(folder, tmp_path / "other")  # shapes are equal, values are in other places
    assert not is_same(read_folder(tmp_path / "other"), read_folder(tmp_path / "hf"))


class Touch:
    """Make a file when unpickled, which must not happen."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_runs_nothing_and_is_refused_as_a_model(tmp_path, folder):
    marks = [tmp_path / name for name in ("control", "argument", "model")]
    pickle.loads(pickle.dumps(Touch(marks[0])))
    path = next(folder.rglob(MODEL_FILE))
    state = torch.load(path, weights_only=True)
    torch.save({**state, "args": Touch(marks[1])}, path)
    run(folder, tmp_path / "back")
    torch.save({**state, "model": {**state["model"], "a": Touch(marks[2])}}, path)
    with pytest.raises(
        ConfigError, match=f"{path.parent.name}/{MODEL_FILE}: model: 'a': expected a tensor, found mkdir"
    ):
        open_source(folder)
    assert [mark.exists() for mark in marks] == [True, False, False]


def change_state(folder, change):
    path = sorted(folder.rglob(MODEL_FILE))[0]
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def not_contiguous(state):
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    state["model"][name] = state["model"][name].t().contiguous().t()


FAULTS = {
    "no config.json": (lambda f: (f / "config.json").unlink(), f"no config.json beside {TRACKER}; copy"),
    "tracker": (lambda f: (f / TRACKER).write_text("../.."), "expected the number of an iteration, found '../..'"),
    "missing file": (
        lambda f: sorted(f.rglob(MODEL_FILE))[-1].unlink(),
        "1 files are missing, such as mp_rank_01_001_002",
    ),
    "another file": (
        lambda f: shutil.copytree(
            f / ITERATION_FOLDER / "mp_rank_00_000_000", f / ITERATION_FOLDER / "mp_rank_02_000_000"
        ),
        "1 files are not of layout",
    ),
    "cut off": (lambda f: os.truncate(next(f.rglob(MODEL_FILE)), 9000), "is not a complete file of torch.save"),
    "no model": (lambda f: change_state(f, lambda s: s.pop("model")), "expected key model, or model0, model1"),
    "another parameter": (
        lambda f: change_state(f, lambda s: s["model"].update({"decoder.layers.0.lora": torch.ones(1)})),
        "parameter 'decoder.layers.0.lora' is not a DeepSeek-V3 parameter",
    ),
    "shape": (
        lambda f: change_state(f, lambda s: s["model"].update({"embedding.word_embeddings.weight": torch.ones(3, 3)})),
        r"embedding.word_embeddings.weight.* expected bfloat16 \(256, 128\)",
    ),
    "strides": (
        lambda f: change_state(f, not_contiguous),
        r"linear_proj.weight: expected a contiguous .* found strides",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_folder_is_refused_by_name(folder, fault):
    open_source(folder)  # control: the folder is accepted
    change, words = FAULTS[fault]
    change(folder)
    with pytest.raises(ConfigError, match=words):
        open_source(folder)


def test_a_flipped_bit_is_found_by_the_zips_own_checksums(folder):
    assert list(crc_problems(folder)) == []
    path = next(folder.rglob(MODEL_FILE))
    with zipfile.ZipFile(path) as file:
        info = max(file.infolist(), key=lambda each: each.file_size)
    data = bytearray(path.read_bytes())
    data[info.header_offset + 200] ^= 1
    path.write_bytes(data)
    (problem,) = crc_problems(folder)
    assert str(path.relative_to(folder)) in problem and "CRC-32" in problem
