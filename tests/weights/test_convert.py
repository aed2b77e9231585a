"""Conversions: bit for bit there and back, shared by parts, resumed after a kill, refused by name before they write."""

import json
import os
import random
import resource
import signal
import time

import pytest
import torch

from tests.weights.cases import (
    SMALL,
    SMALL_LAYOUT,
    in_fp8,
    is_same,
    make_folder,
    make_fp8_folder,
    random_case,
    read_folder,
    rewrite,
    run,
    store,
)
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.model_folder import MTP_LAYERS
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.tiny import tiny_config
from verl_patches.weights import convert as convert_module
from verl_patches.weights import plan as plan_module
from verl_patches.weights.convert import convert
from verl_patches.weights.manifest import file_problems, folder_problems, read_manifest, recorded
from verl_patches.weights.plan import parse_part, plan_conversion
from verl_patches.weights.source import open_source

LAYOUT = parse_layout("tp2 pp2 ep4 etp1 @8 layers=1,3")


@pytest.fixture
def small(tmp_path):
    make_folder(tmp_path / "hf", SMALL)
    return tmp_path / "hf"


def checksums(folder):
    return {file.name: file.sha256 for file in read_manifest(folder).files}


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 30))])
def test_round_trip_of_random_models_and_layouts(tmp_path, seed, monkeypatch):
    """HF to shards, to shards of another layout, to HF: every tensor equal (regions: test_regions.py)."""
    config, layout, other = random_case(seed)
    monkeypatch.setattr(plan_module, "BLOCK_BYTES", random.Random(seed).choice([1, plan_module.BLOCK_BYTES]))
    expected = make_folder(tmp_path / "hf", config, seed, files=1 + seed % 3)
    size = sum(tensor.nbytes for tensor in expected.values())
    done = run(tmp_path / "hf", tmp_path / "shards", layout)
    assert done.manifest.layout == str(layout) and done.read_bytes == size
    stored = sum(tensor.size_bytes for file in done.manifest.files for tensor in file.tensors)
    assert stored == size  # no byte in two files
    run(tmp_path / "shards", tmp_path / "other", other)
    run(tmp_path / "other", tmp_path / "back")
    assert is_same(read_folder(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    run(tmp_path / "hf", tmp_path / "direct")
    assert checksums(tmp_path / "back") == checksums(tmp_path / "direct")
    name, tensor = next(iter(expected.items()))
    tensor.view(torch.uint8)[0, 0] ^= 1  # control: one bit
    assert not is_same(read_folder(tmp_path / "back"), expected), name


@pytest.mark.parametrize("block_bytes", [1, 16 << 20])
def test_fp8_to_bf16_and_shards_and_back_to_fp8(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(plan_module, "BLOCK_BYTES", block_bytes)
    config = SMALL | {"hidden_size": 144, "intermediate_size": 300, "torch_dtype": "bfloat16"}
    _, values = make_fp8_folder(tmp_path, config)
    run(tmp_path / "fp8", tmp_path / "bf16")
    assert is_same(read_folder(tmp_path / "bf16"), values)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == config  # without quantization_config
    run(tmp_path / "fp8", tmp_path / "shards", SMALL_LAYOUT)
    run(tmp_path / "shards", tmp_path / "from_shards")
    assert is_same(read_folder(tmp_path / "from_shards"), values)
    run(tmp_path / "shards", tmp_path / "again", dtype="fp8")
    run(tmp_path / "again", tmp_path / "last")
    assert open_source(tmp_path / "again").block == (128, 128)
    again, last = in_fp8(values)
    assert is_same(read_folder(tmp_path / "again"), again) and is_same(read_folder(tmp_path / "last"), last)


def test_fp32_is_kept_or_rounded_and_the_bias_never(tmp_path):
    tensors = make_folder(tmp_path / "bf16", SMALL)
    wide = {name: torch.randn(t.shape) for name, t in tensors.items()}
    make_folder(tmp_path / "hf", SMALL | {"torch_dtype": "float32"}, tensors=wide)
    run(tmp_path / "hf", tmp_path / "kept", SMALL_LAYOUT)
    run(tmp_path / "kept", tmp_path / "back")
    assert is_same(read_folder(tmp_path / "back"), wide)
    run(tmp_path / "kept", tmp_path / "rounded", dtype="bf16")
    expected = {name: t if name.endswith("correction_bias") else t.bfloat16() for name, t in wide.items()}
    assert is_same(read_folder(tmp_path / "rounded"), expected)
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_layers_for_multi_token_prediction_are_left_out(tmp_path, small):
    tensors = make_folder(tmp_path / "other", SMALL)
    more = {
        "model.layers.2.eh_proj.weight": torch.ones(2, 2),
        "model.layers.2.mlp.x.weight_scale_inv": torch.ones(1, 1),
    }
    store(small, tensors | more)
    (small / "config.json").write_text(json.dumps(SMALL | {MTP_LAYERS: 1}))
    assert open_source(small).left_out == tuple(more)
    run(small, tmp_path / "out")
    assert is_same(read_folder(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[MTP_LAYERS] == 0


# ---- parts, resuming, damage


@pytest.mark.parametrize("layout", [None, SMALL_LAYOUT])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_parts_equal_one_whole(tmp_path, small, layout, order):
    run(small, tmp_path / "whole", layout)
    done = [run(small, tmp_path / "parts", layout, part=part, parts=2) for part in order]
    assert done[0].manifest is None and len(done[0].missing) == done[1].written and done[0].written > 2
    run(small, tmp_path / "half", layout, part=1, parts=2)
    with pytest.raises(ConfigError, match="not complete"):
        open_source(tmp_path / "half")
    assert done[1].manifest is not None and checksums(tmp_path / "parts") == checksums(tmp_path / "whole")


def test_a_finished_conversion_is_checked_and_a_damaged_file_written_again(tmp_path, small):
    out = tmp_path / "out"
    first = run(small, out, SMALL_LAYOUT)
    before = checksums(out)
    again = run(small, out, SMALL_LAYOUT)
    assert (again.written, again.kept, again.read_bytes) == (0, first.written, 0)
    file = out / "experts-pp01-ep001-etp00.safetensors"
    flip(file)
    (problem, _) = folder_problems(out, read_manifest(out))
    assert problem.file == file.name and problem.tensor == "model.layers.1.mlp.experts.3.down_proj.weight"
    assert run(small, out, SMALL_LAYOUT).written == 1 and checksums(out) == before
    assert folder_problems(out, read_manifest(out)) == []


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def test_a_part_that_finds_damage_keeps_what_another_wrote_meanwhile(tmp_path, small, monkeypatch):
    out, problems = tmp_path / "out", convert_module.file_problems
    run(small, out, SMALL_LAYOUT, part=1, parts=2)
    plan = plan_conversion(open_source(small), SMALL_LAYOUT)
    flip(out / plan.share(1, 2)[-1].files[0].name)

    def slow(*given):  # the other part completes the folder while this one reads its files
        monkeypatch.setattr(convert_module, "file_problems", problems)
        assert convert(plan, out, 0, 2).manifest is not None
        return problems(*given)

    monkeypatch.setattr(convert_module, "file_problems", slow)
    done = convert(plan, out, 1, 2)
    assert done.written == 1 and done.missing == () and folder_problems(out, done.manifest) == []


def test_parts_that_mend_one_folder_together_do_not_complete_each_others_damaged_files(tmp_path, small, monkeypatch):
    out, write_groups, met = tmp_path / "out", convert_module._write_groups, []
    run(small, out, SMALL_LAYOUT)
    before, plan = checksums(out), plan_conversion(open_source(small), SMALL_LAYOUT)
    for part in (0, 1):
        flip(out / plan.share(part, 2)[-1].files[0].name)

    def convert_part(part, then):
        def meet(*given):
            monkeypatch.setattr(convert_module, "_write_groups", write_groups)
            then()
            return write_groups(*given)

        monkeypatch.setattr(convert_module, "_write_groups", meet)
        return convert(plan, out, part, 2)

    with pytest.raises(KeyboardInterrupt):  # part 0 has just opened the folder again
        convert_part(0, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    last = convert_part(1, lambda: met.append(convert(plan, out, 0, 2)))
    assert met[0].manifest is None and met[0].missing == (plan.share(1, 2)[-1].files[0].name,)
    assert last.manifest is not None and checksums(out) == before
    assert folder_problems(out, read_manifest(out)) == [] and not (out / "manifest.d").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_conversion_goes_on_and_ends_with_the_same_checksums(tmp_path, seed):
    make_folder(tmp_path / "hf", tiny_config())
    start = time.perf_counter()
    run(tmp_path / "hf", tmp_path / "whole", LAYOUT)
    seconds, out = time.perf_counter() - start, tmp_path / "out"
    child = os.fork()
    if not child:
        try:
            run(tmp_path / "hf", out, LAYOUT)
        finally:
            os._exit(0)
    time.sleep(random.Random(seed).random() * seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    done = set(recorded(out)) if out.exists() else set()
    result = run(tmp_path / "hf", out, LAYOUT)
    assert result.kept >= len(done) and checksums(out) == checksums(tmp_path / "whole")
    assert folder_problems(out, result.manifest) == [] and not list(out.glob("*.partial"))


def test_a_full_disk_is_said_before_and_leaves_nothing_that_looks_complete(tmp_path, small, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        usage = convert_module.shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
        patch.setattr(convert_module.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(RecipeError, match=r"out: \d+ bytes are to be written, 1000 are free"):
            run(small, out, SMALL_LAYOUT)
    assert not out.exists()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))  # a write past it fails as on a full disk
    try:
        with pytest.raises(RecipeError, match=r"dense-pp0\d-tp0.*could not be written: .*same command again"):
            run(small, out, SMALL_LAYOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(out.glob("dense-pp00*")) and not list(out.glob("*.partial"))  # other groups may be finished
    with pytest.raises(ConfigError, match="not complete"):
        open_source(out)
    run(small, out, SMALL_LAYOUT)
    assert folder_problems(out, read_manifest(out)) == []


def test_the_space_of_files_that_are_written_again_is_free(tmp_path, small, monkeypatch):
    plan, out = plan_conversion(open_source(small), SMALL_LAYOUT), tmp_path / "out"
    files = [file for group in plan.share(0, 1) for file in group.files]
    size, left = sum(file.size_bytes for file in files), out / f"{files[0].name}.partial"
    out.mkdir()
    left.write_bytes(bytes(files[0].size_bytes // 2))
    reused, others = left.stat().st_blocks * 512, left.with_name("other.safetensors.partial")
    others.write_bytes(bytes(100_000))

    def free(count):
        usage = convert_module.shutil._ntuple_diskusage(10**9, 10**9 - count, count)
        monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage)

    free(size - reused - 1)
    assert reused > 1000
    with pytest.raises(RecipeError, match=rf"out: {size} bytes are to be written, {size - 1} are free"):
        convert(plan, out)
    free(size - reused)
    assert convert(plan, out).manifest is not None


def test_a_source_that_is_cut_off_meanwhile_is_named(tmp_path, small):
    plan = plan_conversion(open_source(small), SMALL_LAYOUT)
    os.truncate(small / "model-2.safetensors", 10_000)
    with pytest.raises(RecipeError, match="model-2.safetensors: ends inside .*changed since the start"):
        convert(plan, tmp_path / "out")
    assert not list((tmp_path / "out").glob("dense*"))


# ---- refusals


def test_wrong_use_is_refused_by_name(tmp_path, small):
    make_fp8_folder(tmp_path / "a", SMALL)
    fp8 = tmp_path / "a" / "fp8"
    for source, layout, dtype, words in (
        (small, SMALL_LAYOUT, "fp8", "--dtype fp8: shards hold what training loads"),
        (small, None, "int8", "expected one of bf16, fp8, keep"),
        (fp8, None, "keep", "is stored in FP8; expected bf16"),
        (fp8, None, "fp8", "is stored in FP8; expected bf16"),
        (small, parse_layout("tp3 @3"), None, "tp=3 must divide num_attention_heads 4"),
        (small, parse_layout("tp1 ep4 @4"), None, "ep=4 must divide the number of routed experts 6"),
        (small, parse_layout("pp2 @2 layers=2,2"), None, "adds up to 4, the model has 2 layers"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(source, tmp_path / "out", layout, dtype)
    for text in ("2/2", "1", "-1/2", "a/b", "0/0", "1/2/3"):
        with pytest.raises(ConfigError, match="--part .*expected I/N"):
            parse_part(text)
    assert not (tmp_path / "out").exists() and parse_part("1/2") == (1, 2)


def test_a_folder_of_something_else_is_not_written_to(tmp_path, small):
    run(small, tmp_path / "out", SMALL_LAYOUT)
    with pytest.raises(ConfigError, match="another conversion .kind shards, expected hf"):
        run(small, tmp_path / "out")
    rewrite(small, lambda t: t["lm_head.weight"].add_(1))  # the same names, shapes and sizes, but another model's
    with pytest.raises(ConfigError, match="another conversion .of another source"):
        run(small, tmp_path / "out", SMALL_LAYOUT)
    with pytest.raises(ConfigError, match="expected an empty or a new folder"):
        run(small, small)
    assert file_problems(tmp_path / "out", read_manifest(tmp_path / "out").files[0]) == []
