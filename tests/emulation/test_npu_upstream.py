"""Test that calls of torch_npu in the pinned sources fit the schemas of the pinned wheel."""

import ast

import pytest

from verl_patches.emulation import op_schemas

TREES = {"MindSpeed": "mindspeed", "MindSpeed-LLM": "mindspeed_llm", "vllm-ascend": "vllm_ascend"}
MINDSPORE = "mindspeed/mindspore/"  # a branch of its own, which torch does not import


def dotted(node):
    """Return the dotted name of an expression, "" if it has none."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def calls_made(tree, package, prefix):
    """Return (name, place, number of positional arguments, keywords) of each call of a name that begins with `prefix`.

    Calls that spread *arguments or **keywords are left out.
    """
    for file in sorted((tree / package).rglob("*.py")):
        where = file.relative_to(tree).as_posix()
        nodes = () if where.startswith(MINDSPORE) else ast.walk(ast.parse(file.read_bytes().decode("utf-8", "replace")))
        for node in (node for node in nodes if isinstance(node, ast.Call) and dotted(node.func).startswith(prefix)):
            keywords = tuple(keyword.arg for keyword in node.keywords)
            if None not in keywords and not any(isinstance(argument, ast.Starred) for argument in node.args):
                yield dotted(node.func), f"{where}:{node.lineno}", len(node.args), keywords


@pytest.mark.upstream
def test_every_call_fits_the_schema_of_the_pinned_torch_npu(a3_sources):
    """Check number of arguments and keywords as written upstream, of all functions that the wheel's yaml declares."""
    calls = [
        call
        for tree, package in TREES.items()
        for call in calls_made(a3_sources(tree)[0], package, "torch_npu.npu_")
        if not call[0].startswith("torch_npu.npu.")
    ]
    assert {name for name, *_ in calls} >= {"torch_npu.npu_swiglu", "torch_npu.npu_fusion_attention"}
    assert not_fitting(calls) == []
    attend = "torch_npu.npu_fusion_attention"
    wrong = [(attend, "a:1", 5, ("pre_tokens",)), (attend, "a:2", 20, ()), ("torch_npu.npu_magic", "a:3", 0, ())]
    assert len(not_fitting(wrong)) == 3


def not_fitting(calls):
    found = []
    for name, place, count, keywords in calls:
        schemas = op_schemas.read_schemas().get(name.rpartition(".")[2], ())
        if not any(takes(schema.signature, count, keywords) for schema in schemas):
            found.append(f"{place}: {name} with {count} arguments and {keywords}, expected one of {schemas}")
    return found


def takes(signature, count, keywords):
    try:
        signature.bind(*range(count), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True
