"""Test rows platform.flash_attn and platform.flash_attn_bert_padding: importable without a package, and correct."""

import pytest
import torch

from verl_patches.platform.flash_attn import index_first_axis, pad_input, rearrange, unpad_input

pytestmark = pytest.mark.slow

MASKS = {"holes": [[1, 0, 1, 1], [0, 1, 0, 1]], "one empty sequence": [[1, 1, 0], [0, 0, 0]]}


def tokens(mask):
    """Return (sequence, position) of every token, in order, by the definition."""
    return [(row, column) for row, line in enumerate(mask) for column, there in enumerate(line) if there]


@pytest.mark.parametrize("trailing", [(), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_unpadding_and_padding_follow_the_definition_and_have_gradients(mask, trailing):
    given, (batch, length) = torch.tensor(mask), (len(mask), len(mask[0]))
    values = torch.randn(batch, length, *trailing, dtype=torch.float64, requires_grad=True)
    packed, indices, ends, longest = unpad_input(values, given)
    assert torch.equal(packed, torch.stack([values[place] for place in tokens(mask)]))
    assert indices.tolist() == [row * length + column for row, column in tokens(mask)]
    assert ends.dtype == torch.int32 and ends.tolist() == [sum(map(sum, mask[:n])) for n in range(batch + 1)]
    assert longest == max(map(sum, mask)) and type(longest) is int
    there = given.reshape(batch, length, *[1] * len(trailing))
    assert torch.equal(pad_input(packed, indices, batch, length), values * there)
    assert torch.equal(index_first_axis(rearrange(values, "b s ... -> (b s) ..."), indices), packed)
    rows = torch.randn(int(given.sum()), *trailing, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpad_input(x, given)[0], values)
    assert torch.autograd.gradcheck(lambda x: pad_input(x, indices, batch, length), rows)
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x.flatten(0, 1), torch.tensor([1, 0, 1])), values)


START_CODE = """
import os, sys; sys.path[:0] = [p for p in os.environ.get("MORE", "").split(":") if p]
from verl_patches.patching.engine import current_engine
import verl_patches.prelude_patch
"""
IMPORT_CODE = """
from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input
print(pad_input.__module__)
"""
STATES_CODE = """
print(*(row["state"] for row in current_engine().status() if row["id"].startswith("platform.flash_attn")))
for spec in current_engine().specs.values():
    if not spec.id.startswith("platform.flash_attn"): current_engine().wanted.discard(spec.id)
current_engine().verify("worker")
"""
EMPTY_MODULE_CODE = """
import types, importlib.machinery  # as mindspeed.patch_utils.Patch.parse_path makes one
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
sys.modules["flash_attn"].__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
"""


@pytest.fixture
def run(run_python, tmp_path):
    """Return run(code, patches, flash_attn=False), which runs code with a torch_npu, and a flash_attn if wanted."""

    def run(code, patches, flash_attn=False):
        files = {"torch_npu/__init__.py": ""}
        if flash_attn:
            names = "index_first_axis = rearrange = unpad_input = None\ndef pad_input(): pass\n"
            files |= {"flash_attn/__init__.py": "", "flash_attn/bert_padding.py": names}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return run_python(START_CODE + code, patches=patches, env={"MORE": str(tmp_path)})

    return run


OURS, THEIRS = "verl_patches.platform.flash_attn", "flash_attn.bert_padding"


@pytest.mark.parametrize(
    ("code", "platform", "flash_attn", "printed"),
    [
        (IMPORT_CODE + STATES_CODE, "npu", False, [OURS, "active", "active"]),
        (IMPORT_CODE + STATES_CODE, "npu", True, [THEIRS, "off", "off"]),
        (EMPTY_MODULE_CODE + STATES_CODE, "npu", False, ["overridden", "overridden"]),  # MindSpeed's module
    ],
)
def test_an_installed_package_is_used_and_ours_where_there_is_none(run, code, platform, flash_attn, printed):
    done = run(code, f"line=a3,platform={platform}", flash_attn)
    assert done.out.split() == printed, done.err
    assert ("platform.flash_attn is overridden" in done.err) is (done.rc != 0) is (printed[0] == "overridden")
