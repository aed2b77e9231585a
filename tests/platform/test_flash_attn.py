"""Rows platform.flash_attn and platform.flash_attn_bert_padding: found where nothing is installed, and right."""

import pytest
import torch

from verl_patches.platform.flash_attn import index_first_axis, pad_input, rearrange, unpad_input

pytestmark = pytest.mark.slow  # each starts processes, or plans 256 ranks

MASKS = {
    "left and right padding": [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 1]],
    "one empty sequence": [[1, 1, 0], [0, 0, 0]],
    "no padding": [[1, 1], [1, 1]],
}


def tokens(mask):
    """(sequence, position) of every token, in order: the definition."""
    return [(row, column) for row, line in enumerate(mask) for column, there in enumerate(line) if there]


@pytest.mark.parametrize("trailing", [(), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_unpadding_and_padding_follow_the_definition(mask, trailing):
    given, (batch, length) = torch.tensor(mask), (len(mask), len(mask[0]))
    values = torch.randn(batch, length, *trailing, dtype=torch.float64)
    packed, indices, ends, longest = unpad_input(values, given)
    assert torch.equal(packed, torch.stack([values[place] for place in tokens(mask)]))
    assert indices.tolist() == [row * length + column for row, column in tokens(mask)]
    assert ends.dtype == torch.int32 and ends.tolist() == [sum(map(sum, mask[:n])) for n in range(batch + 1)]
    assert longest == max(map(sum, mask)) and type(longest) is int
    expected = torch.zeros_like(values)
    for place in tokens(mask):
        expected[place] = values[place]
    assert torch.equal(pad_input(packed, indices, batch, length), expected)
    assert torch.equal(index_first_axis(rearrange(values, "b s ... -> (b s) ..."), indices), packed)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradients(mask):
    given = torch.tensor(mask)
    values = torch.randn(*given.shape, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(int(given.sum()), 2, dtype=torch.float64, requires_grad=True)
    indices = unpad_input(values, given)[1]
    assert torch.autograd.gradcheck(lambda x: unpad_input(x, given)[0], values)
    assert torch.autograd.gradcheck(lambda x: pad_input(x, indices, *given.shape), rows)
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x.flatten(0, 1), torch.tensor([1, 0, 1])), values)


def test_what_is_padding_has_no_gradient():
    mask = torch.tensor(MASKS["left and right padding"])
    values = torch.randn(3, 4, 5, requires_grad=True)
    unpad_input(values, mask)[0].sum().backward()
    assert torch.equal(values.grad, mask[..., None].expand(3, 4, 5).float())


ROWS = ("platform.flash_attn", "platform.flash_attn_bert_padding")
IMPORT = """
import os, sys; sys.path[:0] = [p for p in os.environ.get("MORE", "").split(":") if p]
from verl_patches.patching.engine import current
import verl_patches.prelude_patch
{before}
from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input
rows = {{row["id"]: row["state"] for row in current().status()}}
print(pad_input.__module__, *(state for name, state in rows.items() if name.startswith("platform.flash_attn")))
{after}
"""
EMPTY_MODULE = """
import types, importlib.machinery  # as mindspeed/patch_utils.py:76 makes one
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
sys.modules["flash_attn"].__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
"""


@pytest.fixture
def torch_npu(tmp_path):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").touch()
    return {"MORE": str(tmp_path)}


@pytest.mark.parametrize("platform", ["cpu", "npu"])
def test_where_flash_attn_is_missing_the_rows_give_ours(run_python, torch_npu, platform):
    patches = f"line=a3,platform={platform}"
    done = run_python(IMPORT.format(before="", after=""), patches=patches, env=torch_npu).check()
    assert done.out.split() == ["verl_patches.platform.flash_attn", "active", "active"]


@pytest.mark.parametrize("row", ROWS)
def test_without_the_row_the_import_fails(run_python, torch_npu, row):
    done = run_python(IMPORT.format(before="", after=""), patches=f"line=a3,platform=npu,-{row}", env=torch_npu)
    assert done.rc != 0 and "ModuleNotFoundError: No module named 'flash_attn" in done.err


@pytest.fixture
def installed(torch_npu, tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "bert_padding.py").write_text(
        "index_first_axis = rearrange = unpad_input = None\ndef pad_input(): pass\n"
    )
    return torch_npu


VERIFY = """
for spec in current().specs.values():
    if not spec.id.startswith("platform.flash_attn"): current().wanted.discard(spec.id)
current().verify("worker")
print("proven")
"""


@pytest.mark.parametrize("before", ["", "import flash_attn"])
def test_an_installed_package_is_used_and_the_rows_are_off(run_python, installed, before):
    code = IMPORT.format(before=before, after=VERIFY)
    assert run_python(code, patches="line=a3,platform=npu", env=installed).check().out.split() == [
        "flash_attn.bert_padding",
        "off",
        "off",
        "proven",
    ]


def test_an_empty_module_of_that_name_is_no_installed_package(run_python, torch_npu):
    code = IMPORT.format(before=EMPTY_MODULE, after="").replace("from flash_attn.bert_padding import", "pass #")
    code = code.replace("pad_input.__module__, ", "") + VERIFY
    done = run_python(code, patches="line=a3,platform=npu", env=torch_npu)
    assert done.out.split() == ["overridden"] * 2 and "platform.flash_attn is overridden" in done.err
