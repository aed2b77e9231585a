"""Weights that are damaged, not finite, or laid out to harm are refused by name; nothing of them looks complete."""

import json
import os

import pytest
import torch

from tests.weights.cases import (
    SMALL,
    SMALL_LAYOUT,
    make_folder,
    make_fp8_folder,
    read_folder,
    rewrite,
    run,
    store,
    write_checkpoint,
)
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import MOST_TENSORS, build_inventory
from verl_patches.layout.model_folder import INDEX, SCALE
from verl_patches.reshard.region import Region
from verl_patches.weights import manifest as m
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import open_source

DOWN, ROUTER, NORM = (f"model.layers.1.{n}.weight" for n in ("mlp.experts.3.down_proj", "mlp.gate", "input_layernorm"))
HEAD, SCALES = "lm_head.weight", f"{DOWN}_scale_inv"


def is_incomplete(folder):
    """Whether nothing passes the folder for complete, nor a file for finished that is not right."""
    if not m.has_manifest(folder):
        return not (folder / m.TRACKER).exists() and not list(folder.rglob("*.partial"))
    manifest = m.read_manifest(folder, complete=False)
    finished = [m.read_record(folder, name) for name in m.recorded(folder)]
    problems = [problem for entry in finished for problem in m.file_problems(folder, entry)]
    return not manifest.complete and not problems and not list(folder.glob("*.partial"))


# ---- bytes that are not those that were written


@pytest.fixture
def sources(tmp_path):
    """{kind: folder}: HF folders in bf16 and in FP8, and a checkpoint, all with checksums."""
    tensors = make_folder(tmp_path / "plain", SMALL)
    run(tmp_path / "plain", tmp_path / "hf")
    run(tmp_path / "plain", tmp_path / "fp8", dtype="fp8")
    write_checkpoint(tmp_path / "checkpoint", tensors, SMALL, {"step": 1})
    return {kind: tmp_path / kind for kind in ("hf", "fp8", "checkpoint")}


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def place_of(folder, key):
    """(file, offset of the last byte) of a stored tensor: one bit there changes a value a little."""
    for file in m.read_manifest(folder).files:
        end = file.size_bytes
        for tensor in reversed(file.tensors):
            if tensor.key == key:
                return folder / file.name, end - 2
            end -= tensor.size_bytes
    raise AssertionError(key)


@pytest.mark.parametrize(
    ("kind", "layout", "key"),
    [
        ("hf", SMALL_LAYOUT, ROUTER),
        ("fp8", SMALL_LAYOUT, DOWN),
        ("fp8", None, SCALES),
        ("checkpoint", SMALL_LAYOUT, f"weight/{NORM}"),
    ],
)
def test_a_flipped_bit_of_a_source_with_checksums_is_not_converted(tmp_path, sources, kind, layout, key):
    run(sources[kind], tmp_path / "control", layout)
    path, at = place_of(sources[kind], key)
    flip(path, at)
    with pytest.raises(
        RecipeError, match=rf"{path.name}: {key.removeprefix('weight/')}.*: expected sha256 .*manifest.json.*found"
    ):
        run(sources[kind], tmp_path / "out", layout)
    assert is_incomplete(tmp_path / "out")
    flip(path, at)
    run(sources[kind], tmp_path / "out", layout)  # goes on
    open_source(tmp_path / "out")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_damaged_small_file_is_not_copied(tmp_path, sources, name):
    path = sources["checkpoint"] / name
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RecipeError, match=f"{name}: .*expected .* bytes, found"):
        run(sources["checkpoint"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- values that are not finite


def set_one(name, value):
    """A change of one element of one tensor."""

    def change(tensors):
        flat = tensors[name].view(-1)
        flat[flat.numel() // 2] = value

    return change


NOT_FINITE = [  # (folder, tensor, value, what is said)
    ("hf", DOWN, torch.nan, "NaN or infinity"),
    ("hf", "model.norm.weight", torch.inf, "NaN or infinity"),
    ("hf", "model.layers.1.mlp.gate.e_score_correction_bias", -torch.inf, "NaN or infinity"),
    ("fp8", DOWN, torch.nan, "holds NaN"),
    *(("fp8", SCALES, value, "the scale of block") for value in (torch.nan, torch.inf, 0.0, -1.0)),
]
WRITTEN = [(None, None), (SMALL_LAYOUT, None), (None, "fp8")]


@pytest.mark.parametrize(
    ("source", "name", "value", "words", "layout", "dtype"),
    [(*case, *written) for case in NOT_FINITE for written in WRITTEN if case[0] == "hf" or written[1] is None],
)
def test_a_value_that_is_not_finite_is_refused(tmp_path, source, name, value, words, layout, dtype):
    make_folder(tmp_path / "hf", SMALL) if source == "hf" else make_fp8_folder(tmp_path, SMALL)
    run(tmp_path / source, tmp_path / "control", layout, dtype)
    rewrite(tmp_path / source, set_one(name, value))
    with pytest.raises(RecipeError, match=f"{name}: .*{words}"):
        run(tmp_path / source, tmp_path / "out", layout, dtype)
    assert is_incomplete(tmp_path / "out")
    weight = build_inventory(SMALL).by_name[name.replace(SCALE, "weight")]
    with WeightReader(open_source(tmp_path / source)) as reader, pytest.raises(RecipeError, match=f"{name}: .*{words}"):
        reader.copy(Region(weight.name, 0, 0, weight.shape[0]), torch.empty(weight.shape))


def test_large_values_are_finite_and_rounding_to_infinity_is_refused(tmp_path):
    """A sum of large values is infinite although each is finite; fp32 past the largest bf16 is not, in bf16."""
    wide = {name: tensor.float() for name, tensor in make_folder(tmp_path / "bf16", SMALL).items()}
    wide[DOWN][:] = 3e38
    make_folder(tmp_path / "hf", SMALL | {"torch_dtype": "float32"}, tensors=wide)
    run(tmp_path / "hf", tmp_path / "kept")
    run(tmp_path / "hf", tmp_path / "rounded", dtype="bf16")
    wide[DOWN][1, 1] = torch.finfo(torch.float32).max
    store(tmp_path / "hf", wide)
    run(tmp_path / "hf", tmp_path / "kept_too")
    with pytest.raises(RecipeError, match=f"{DOWN}: holds NaN or infinity"):
        run(tmp_path / "hf", tmp_path / "out", dtype="bf16")


# ---- files that are no files, names that are paths, sizes that nothing has


def replaced(path, make):
    """Put what `make` makes in the place of a file; the file itself goes to another folder."""
    other = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(other)
    make(path, other)


KINDS = {
    "named pipe": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: path.mkdir(),
    "is a link to": lambda path, other: path.symlink_to(other),
    "FileNotFoundError": lambda path, _: path.symlink_to("nothing"),
}


READ = ("config.json", INDEX, "model-2.safetensors", "tokenizer.json")


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in READ if (kind, name) != ("folder", "tokenizer.json")],  # is not read
)
def test_what_is_no_file_of_the_folder_is_refused_by_kind(tmp_path, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "hf", SMALL)
    replaced(tmp_path / "hf" / name, KINDS[kind])
    with pytest.raises(ConfigError, match=rf"{name}: .*{kind}"):
        run(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_link_and_links_inside_of_it_are_read(tmp_path):
    tensors = make_folder(tmp_path / "hf", SMALL)
    (tmp_path / "hf" / "model-2.safetensors").rename(tmp_path / "hf" / "held")
    (tmp_path / "hf" / "model-2.safetensors").symlink_to("held")
    (tmp_path / "link").symlink_to("hf")
    run(tmp_path / "link", tmp_path / "out")
    assert read_folder(tmp_path / "out").keys() == tensors.keys()


def test_a_folder_of_hugging_faces_cache_gets_the_command_that_makes_files_of_it(tmp_path):
    make_folder(tmp_path / "blobs", SMALL)
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    with pytest.raises(ConfigError, match=rf"cp -rlL {snapshot} NEW_FOLDER .*, else cp -rL"):
        open_source(snapshot)
    for options in ("-rlL", "-rL"):
        new = tmp_path / options
        assert os.system(f"cp {options} {snapshot} {new}") == 0
        open_source(new)
        assert all(path.samefile(snapshot / path.name) == (options == "-rlL") for path in new.iterdir())


NAMES = ["../hf/model-2.safetensors", "", "..", "a\nb", None]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_an_index_or_manifest_stays_in_its_folder(tmp_path, sources, name):
    index = json.loads((tmp_path / "plain" / INDEX).read_text())
    index["weight_map"][DOWN] = name
    (tmp_path / "plain" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="is no name of a file beside it"):
        open_source(tmp_path / "plain")
    path = sources["hf"] / m.MANIFEST
    original = json.loads(path.read_text())
    for edited in ({"files": [{**original["files"][0], "name": name}]}, {"expected": [name], "state": "writing"}):
        found = {**original, **edited}
        path.write_text(json.dumps({**found, "digest": m.content_digest(found)}))
        with pytest.raises(ConfigError, match="is no name of a file beside it"):
            m.read_manifest(sources["hf"], complete=False)


# ---- folders that are not whole or not of DeepSeek-V3


def put(name, change):
    """A change of one tensor of a folder."""
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: change(tensors[name])}))


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_config(folder, **values):
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | values))


def resize(name, size):
    """Cut a file, or make it longer by a hole."""
    return lambda folder: os.truncate(folder / name, size)


def write_header(entry):
    """A file with 4 bytes of one tensor, described by `entry`."""
    text = json.dumps({"x": entry}).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(4)
    return lambda folder: (folder / "model-2.safetensors").write_bytes(data)


HEADERS = [
    {"dtype": "BF16", "shape": [-1, -2], "data_offsets": [0, 4]},
    {"dtype": "BF16", "shape": [2], "data_offsets": [0, 2, 4]},
    {"dtype": "BF16", "shape": [2]},
    None,
]
MANY = f"num_hidden_layers .*expected at most {MOST_TENSORS}"  # before they are listed
FAULTS = {
    "missing tensor": (lambda f: rewrite(f, lambda t: t.pop(DOWN)), f"1 tensors are missing, as {DOWN}"),
    "unknown tensor": (lambda f: rewrite(f, lambda t: t.update(x=torch.ones(1))), "not known to config.json, as x"),
    "shape": (put(HEAD, lambda t: t[1:]), rf"{HEAD}: expected .*\(512, 128\)"),
    "integers": (put(HEAD, torch.Tensor.int), f"{HEAD}: expected .*found I32"),
    "fp8 head": (put(HEAD, lambda t: t.to(torch.float8_e4m3fn)), f"{HEAD}: expected F32, .*found F8_E4M3"),
    "duplicate": (
        lambda f: (
            (f / "model-3.safetensors").write_bytes((f / "model-2.safetensors").read_bytes())
            and edit_index(f, lambda m: m.update(x="model-3.safetensors"))
        ),
        "is in model-2.safetensors and in model-3.safetensors",
    ),
    "file without index entry": (
        lambda f: (f / "old.safetensors").write_bytes((f / "model-2.safetensors").read_bytes()),
        "old.safetensors is not named in",
    ),
    "stale index": (
        lambda f: edit_index(f, lambda m: m.update({HEAD: [x for x in m.values() if x != m[HEAD]][0]})),
        f"{HEAD}: .*index.json says model-.*it is in model-",
    ),
    "index without tensor": (lambda f: edit_index(f, lambda m: m.pop(HEAD)), f"{HEAD}: .*says nothing, it is in"),
    "missing file": (lambda f: (f / "model-2.safetensors").unlink(), "files named in .* are missing, as model-2"),
    "truncated": (resize("model-2.safetensors", 100_000), "model-2.*: not a whole safetensors file .*bytes, expected"),
    "no index": (lambda f: (f / INDEX).unlink(), "expected model.safetensors.index.json, or model.safetensors alone"),
    "tied embeddings": (lambda f: edit_config(f, tie_word_embeddings=True), "tie_word_embeddings is True"),
    "another model": (lambda f: edit_config(f, model_type="llama"), "model_type is 'llama', expected 'deepseek_v3'"),
    "more layers": (lambda f: edit_config(f, num_hidden_layers=3), "tensors are missing, as model.layers.2"),
    "right header of x": (write_header({"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}), "in no file|missing"),
    **{f"header {n}": (write_header(entry), "not a whole safetensors file") for n, entry in enumerate(HEADERS)},
    "large config": (resize("config.json", 1 << 40), rf"config.json: expected at most \d+ bytes, found {1 << 40}"),
    "large index": (resize(INDEX, 1 << 40), rf"{INDEX}: expected at most \d+ bytes"),
    "large manifest": (
        lambda f: (f / m.MANIFEST).touch() or resize(m.MANIFEST, 1 << 40)(f),
        "manifest.*: expected at most",
    ),
    "many layers": (lambda f: edit_config(f, num_hidden_layers=10**9), MANY),
    "many experts": (lambda f: edit_config(f, n_routed_experts=10**9), MANY),
    "gptq": (lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}), "only DeepSeek's FP8"),
}
FP8_FAULTS = {
    "missing scale": (lambda f: rewrite(f, lambda t: t.pop(SCALES)), f"{SCALES} is missing, the scales of {DOWN}"),
    "scale shape": (put(SCALES, lambda t: torch.ones(2, 2)), rf"{SCALES}: expected F32 \(1, 1\).*found F32 \(2, 2\)"),
    "scale dtype": (put(SCALES, torch.Tensor.bfloat16), f"{SCALES}: expected F32 .*found BF16"),
    "no quantization_config": (lambda f: edit_config(f, quantization_config=None), "no quantization_config, but"),
    "scale of bf16": (put(DOWN, torch.Tensor.bfloat16), f"{SCALES} is the scale of no FP8 tensor"),
}


@pytest.mark.parametrize("fault", [*FAULTS, *FP8_FAULTS])
def test_a_bad_source_is_refused_by_name_before_anything_is_written(tmp_path, fault):
    if fault in FAULTS:
        make_folder(tmp_path / "hf", SMALL)
        folder, (spoil, words) = tmp_path / "hf", FAULTS[fault]
    else:
        make_fp8_folder(tmp_path, SMALL)
        folder, (spoil, words) = tmp_path / "fp8", FP8_FAULTS[fault]
    open_source(folder)  # control: it was right
    spoil(folder)
    with pytest.raises(ConfigError, match=words):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
