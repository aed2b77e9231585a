"""Test schemas of the pinned wheel and of MindSpeed's op builders in C++, and calls that are bound by them."""

import hashlib
import inspect
import json
import re
import zipfile

import pytest
import torch

from scripts.extract_npu_schemas import ATB_LIBRARY, WHEEL_FILE, extract
from verl_patches.emulation import op_schemas
from verl_patches.emulation.ascend import mindspeed_ops
from verl_patches.emulation.ascend.packages import torch_npu
from verl_patches.emulation.op_schemas import builder_op
from verl_patches.errors import ConfigError


def test_every_function_of_the_stand_in_has_a_schema_and_the_other_way_round():
    assert {name for name in vars(torch_npu) if name.startswith("npu_")} == set(op_schemas.TRAINING_FUNCTIONS)
    assert set(op_schemas.read_schemas()) == {*op_schemas.FUNCTIONS, *op_schemas.ATB_FUNCTIONS}


def wheel(folder, functions, file=WHEEL_FILE, machine="any", atb_functions=()):
    path = folder / f"torch_npu-9.9.9-cp310-cp310-{machine}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(file, json.dumps({"custom": [{"func": f} for f in functions]}))  # JSON is YAML
        archive.writestr(ATB_LIBRARY, b"\x7fELF\0" + "\0".join(atb_functions).encode() + b"\0")
    return path


def test_extraction_from_a_wheel(tmp_path):
    wanted = ["npu_a(Tensor self) -> Tensor", "npu_a.out(Tensor self, *, Tensor(a!) y) -> Tensor(a!)"]
    of_atb = ["_npu_c(Tensor x, Tensor(a!) out) -> ()", "npu_d.out(Tensor x, *, Tensor(a!) y) -> Tensor(a!)"]
    declared = [wanted[0].replace(" ", "  "), wanted[1], "npu_b(int k) -> Tensor"]
    path = wheel(tmp_path, declared, atb_functions=[*of_atb, "at::Tensor npu_d(at::Tensor x)", "npu_e(int k) -> ()"])
    found = extract([path], ["npu_a"], ["_npu_c", "npu_d"])
    assert found["functions"] == wanted and found["atb_functions"] == of_atb
    assert found["version"] == "9.9.9" and found["sha256"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    odd, other = wheel(tmp_path, [], "other.yaml", "x"), wheel(tmp_path, wanted[:1], machine="other")
    for words, wheels, names, atb_names in (
        ("found none of npu_c", [path], ["npu_a", "npu_c"], []),
        ("to register npu_f, found none", [path], ["npu_a"], ["npu_f"]),
        ("expected a torch_npu wheel", [odd], ["npu_a"], []),
        ("expected a wheel", [op_schemas.SCHEMA_FILE], ["npu_a"], []),
        ("different in .*other.whl", [path, other], ["npu_a"], []),
    ):
        with pytest.raises(ConfigError, match=words):
            extract(wheels, names, atb_names)


def test_lines_become_signatures_of_python_and_what_is_no_schema_is_refused():
    line = "f.x(Tensor(a!) self, SymInt[]? b=None, *, str m='A', Tensor(b!) y, Tensor(c!) z) -> (Tensor, int)"
    schema = op_schemas.parse_schema(line)
    assert str(schema.signature) == "(input, b=None, *, m='A', out)"
    assert schema.kinds == {"input": "Tensor", "b": "Optional[List[int]]", "m": "str", "out": "List[Tensor]"}
    assert (schema.name, schema.overload, schema.outputs) == ("f", "x", 2)
    assert str(op_schemas.parse_schema(line, gather_outputs=False).signature) == "(input, b=None, *, m='A', y, z)"
    with pytest.raises(ConfigError, match="expected a schema"):
        op_schemas.parse_schema("f(Tensor) -> Tensor")


X = torch.zeros(2, 4)
# reason -> function, arguments, keywords: what upstream could pass, one of each kind
BAD_CALLS = {
    "unknown name": (torch_npu.npu_rms_norm, (X, torch.ones(4)), {"eps": 1e-6}),
    "positional where a keyword is needed": (torch_npu.npu_moe_gating_top_k, (X, 1, torch.zeros(4)), {}),
    "too few": (torch_npu.npu_swiglu, (), {}),
    "float for an int": (torch_npu.npu_swiglu, (X, 1.0), {}),
    "tensor for a list of tensors": (torch_npu.npu_grouped_matmul, (X, [X]), {}),
    "builder: keyword where the C++ names none": (
        mindspeed_ops.npu_gmm, ([X], [X], []), {"group_list": None, "group_type": 0, "group_list_type": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_wrong_names_and_kinds_are_type_errors(name):
    function, arguments, keywords = BAD_CALLS[name]
    with pytest.raises(TypeError, match="npu_"):
        function(*arguments, **keywords)


def test_kinds_are_no_stricter_than_the_real_ones():
    torch_npu.npu_rms_norm(X, torch.ones(4), 1)  # an int is a float
    torch_npu.npu_moe_token_unpermute(X, torch.tensor([1, 0]), restore_shape=torch.Size((2, 4)))
    ours = builder_op("f(int? k, int[]? ends, Scalar s) -> ()")(lambda k, ends, s: (k, ends, s))
    assert ours(None, None, True) == (None, None, True)


# -- MindSpeed's builders, against their C++ ----------------------------------------------------------------------

KINDS = {
    "at::Tensor": "Tensor", "std::vector<at::Tensor>": "List[Tensor]", "int64_t": "int", "double": "float",
    "bool": "bool", "std::string": "str", "std::vector<int64_t>": "List[int]", "at::IntArrayRef": "List[int]",
}  # fmt: skip


def schema_type(cpp):
    cpp = re.sub(r"\bconst\b|&|\s", "", cpp)
    optional = re.fullmatch(r"c10::optional<(.*)>", cpp)
    return f"Optional[{KINDS[optional[1]]}]" if optional else KINDS[cpp]


def declared(text):
    """Return {Python name: [(names or None, kinds, {name: default text}) of each overload]} of a pybind11 file."""
    found = {}
    for name, function, rest in re.findall(r'm\.def\("(\w+)",\s*(?:\(\w+\))?&(\w+),(.*?)\);', text, re.DOTALL):
        named = re.findall(r'pybind11::arg\("(\w+)"\)(?:\s*=\s*(pybind11::none\(\)|[^,\s)]+))?', rest)
        bodies = re.findall(rf"\b{function}\(([^{{}};]*?)\)\s*\{{", text)
        kinds = [[schema_type(re.sub(r"\s*\w+$", "", p.strip())) for p in body.split(",")] for body in bodies]
        found[name] = [([n for n, _ in named] or None, of, {n: d for n, d in named if d}) for of in kinds]
    return found


DEFAULTS = {"pybind11::none()": None, "false": False, "true": True, "0": 0, '"SBH"': "SBH"}


@pytest.mark.upstream
@pytest.mark.parametrize("name", sorted(mindspeed_ops.OPS))
def test_builder_ops_equal_their_source(a3_sources, name):
    tree = a3_sources("MindSpeed")[0] / "mindspeed"
    builder = next(f for f in (tree / "op_builder").glob("*.py") if f'OP_NAME = "{name}"' in f.read_text())
    sources = re.findall(r"'(ops/csrc/(?!flop_counter|atb/utils)[\w/]+\.cpp)'", builder.read_text())
    found = declared((tree / sources[0]).read_text())
    assert set(found) == set(vars(mindspeed_ops.OPS[name]))
    for function, overloads in found.items():
        ours = getattr(mindspeed_ops.OPS[name], function)
        parameters = inspect.signature(ours).parameters
        kinds = sorted(tuple(kinds) for _, kinds, _ in overloads)
        assert kinds and sorted(tuple(s.kinds.values()) for s in ours.schemas) == kinds
        for named, _, defaults in overloads:
            only_by_place = {p.kind is p.POSITIONAL_ONLY for p in parameters.values()}
            assert only_by_place == {named is None}
            assert named is None or named == list(parameters)
            has = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
            assert has == {n: DEFAULTS[d] for n, d in defaults.items()}
