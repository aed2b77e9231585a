"""Read schemas of torch_npu functions from the committed file, which scripts/extract_npu_schemas.py makes from wheels.

The file holds lines like `npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)` for all
functions that MindSpeed, MindSpeed-LLM and vllm-ascend call at the pinned versions, with the wheels' version and
hashes. In Python `self` is called `input`. The schemas of ATB, CANN's transformer library (_npu_flash_attention,
torch_npu.atb.*), come from the library that registers them. `torch_npu_op`, `atb_op` and `builder_op` bind the
arguments of a function of verl_patches.reference by such a schema, as the real binding does.
"""

from __future__ import annotations

import functools
import inspect
import json
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import torch

from verl_patches.errors import ConfigError
from verl_patches.reference import demand

# Training calls these.
TRAINING_FUNCTIONS = """
npu_apply_adam_w npu_fusion_attention npu_grouped_matmul npu_moe_gating_top_k npu_moe_token_permute
npu_moe_token_unpermute npu_rms_norm npu_rotary_mul npu_swiglu
""".split()
# vllm-ascend calls these too for DeepSeek-V3.
ENGINE_FUNCTIONS = """
npu_add_rms_norm npu_fused_infer_attention_score npu_interleave_rope npu_kv_rmsnorm_rope_cache
npu_moe_compute_expert_tokens npu_moe_distribute_combine npu_moe_distribute_dispatch npu_moe_finalize_routing
npu_moe_init_routing
""".split()
# Upstream calls these in code that DeepSeek-V3 never reaches.
UNREACHED_FUNCTIONS = """
npu_all_gather_base_mm npu_confusion_transpose npu_convert_weight_to_int4pack npu_dequant_swiglu_quant npu_dtype_cast
npu_dynamic_quant npu_fast_gelu npu_format_cast npu_fusion_attention_grad npu_incre_flash_attention
npu_mm_reduce_scatter_base npu_moe_gating_top_k_softmax npu_prompt_flash_attention npu_quant_matmul npu_quantize
npu_scaled_masked_softmax npu_swiglu_backward npu_weight_quant_batchmatmul
""".split()
FUNCTIONS = sorted(TRAINING_FUNCTIONS + ENGINE_FUNCTIONS + UNREACHED_FUNCTIONS)
# ATB's functions: torch_npu.NAME with an underscore, torch_npu.atb.NAME without one.
ATB_FUNCTIONS = """
_npu_flash_attention _npu_paged_attention_mla _npu_reshape_and_cache _npu_rotary_embedding
npu_multi_head_latent_attention npu_paged_cache_load npu_ring_mla
""".split()
# Arguments without an effect on what references compute; others that a reference does not take must be the defaults.
IGNORED_ARGUMENTS = {
    "npu_fusion_attention": ("gen_mask_parallel", "inner_precise", "next_tockens", "pre_tockens", "sync"),
    "npu_moe_token_unpermute": ("restore_shape",),
}
TORCH_NPU_VERSION = "2.5.1.post1"
SCHEMA_FILE = Path(__file__).with_name(f"torch_npu-{TORCH_NPU_VERSION}.json")


@dataclass(frozen=True)
class Schema:
    """Describe one function or overload by its signature in Python and the kinds of its arguments.

    `kinds` is {argument: kind} as torch prints it ("Optional[Tensor]"); `outputs` is the number of returned values.
    """

    name: str
    overload: str
    signature: Signature
    kinds: dict[str, str]
    outputs: int


def parse_schema(text: str, gather_outputs: bool = True) -> Schema:
    """Parse one schema line with torch's own parser; raise ConfigError if it is not a schema.

    With gather_outputs, keyword-only outputs become one argument `out`, as in functions of torch_npu; functions of
    torch.ops, such as ATB's, keep the outputs' names.
    """
    try:
        declared = torch._C.parse_schema(text)
    except RuntimeError as error:
        raise ConfigError(f"expected a schema, name(kind argument, ...) -> returns, found {text!r}: {error}") from error
    parameters: dict[str, Parameter] = {}
    kinds: dict[str, str] = {}
    for a in declared.arguments:
        name, kind = "input" if a.name == "self" else a.name, str(a.real_type)
        if gather_outputs and a.is_out:  # torch takes these as one tuple
            name, kind = "out", "List[Tensor]"
        place = Parameter.KEYWORD_ONLY if a.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD
        default = a.default_value if a.has_default_value() else Parameter.empty
        parameters[name], kinds[name] = Parameter(name, place, default=default), kind
    signature = Signature(list(parameters.values()))
    return Schema(declared.name, declared.overload_name, signature, kinds, len(declared.returns))


@functools.cache
def read_schemas(file: Path = SCHEMA_FILE) -> dict[str, tuple[Schema, ...]]:
    """Return {function: its overloads} from the committed file."""
    found: dict[str, tuple[Schema, ...]] = {}
    content = json.loads(file.read_text())
    schemas = [parse_schema(text) for text in content["functions"]]
    schemas += [parse_schema(text, gather_outputs=False) for text in content["atb_functions"]]
    for schema in schemas:
        found[schema.name] = (*found.get(schema.name, ()), schema)
    return found


# -- calls that are checked by schemas ---------------------------------------------------------------------------------

CALL_COUNTS: Counter[str] = Counter()  # name of a reference -> its calls in this process

_KIND_CHECKS: dict[str, Callable[[Any], bool]] = {
    "Tensor": lambda x: isinstance(x, torch.Tensor),
    "int": lambda x: isinstance(x, (numbers.Integral, torch.SymInt)) and not isinstance(x, bool),
    "float": lambda x: isinstance(x, (numbers.Real, torch.SymFloat)) and not isinstance(x, bool),
    "number": lambda x: isinstance(x, numbers.Number),
    "bool": lambda x: isinstance(x, bool),
    "str": lambda x: isinstance(x, str),
    "ScalarType": lambda x: isinstance(x, torch.dtype),
}


def fits_kind(value: Any, kind: str) -> bool:
    """Return whether a Python value fits an argument of `kind` ("Optional[Tensor]", "List[int]", "float")."""
    if kind.startswith("Optional["):
        return value is None or fits_kind(value, kind[len("Optional[") : -1])
    if kind.startswith("List["):
        item = kind[len("List[") : -1]
        return isinstance(value, (list, tuple)) and all(fits_kind(entry, item) for entry in value)
    return _KIND_CHECKS[kind](value)


def torch_npu_op(function: Callable) -> Callable:
    """Decorate a reference so that its calls are bound by the schema of the torch_npu function of the same name.

    The reference declares the arguments that it uses, by name; the others must be None or the schema's defaults, unless
    they are IGNORED_ARGUMENTS. A call whose names or kinds do not fit raises TypeError; a ValueError is raised with the
    function's name.
    """
    return _bind_calls(function, read_schemas()[function.__name__])


def atb_op(function: Callable) -> Callable:
    """Decorate a reference of an ATB function, which torch.ops calls: a 1-D tensor may stand for a list of int."""
    return _bind_calls(function, read_schemas()[function.__name__], lists_as_tensors=True)


def builder_op(*schemas: str, by_position: bool = False) -> Callable[[Callable], Callable]:
    """Decorate a reference of a MindSpeed op builder's function; `schemas` are its overloads, after its C++ source.

    by_position: the C++ source gives its arguments no names, so they can be passed by position only.
    """
    return lambda function: _bind_calls(function, tuple(map(parse_schema, schemas)), by_position)


def _bind_calls(
    function: Callable, schemas: tuple[Schema, ...], by_position: bool = False, lists_as_tensors: bool = False
) -> Callable:
    name, parameters = function.__name__, inspect.signature(function).parameters.values()
    used = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    takes_all, ignored = len(used) < len(parameters), set(IGNORED_ARGUMENTS.get(name, ()))
    schema = next(schema for schema in schemas if used <= schema.kinds.keys())
    signature = schema.signature
    if by_position:
        positional = [p.replace(kind=p.POSITIONAL_ONLY) for p in signature.parameters.values()]
        signature = inspect.Signature(positional)
    kinds = {name: {s.kinds[name]: None for s in schemas if name in s.kinds} for name in schema.kinds}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}; it takes {signature}") from None
        for argument, value in bound.arguments.items():
            is_list = lists_as_tensors and "List[int]" in kinds[argument] and isinstance(value, torch.Tensor)
            if not is_list and not any(fits_kind(value, kind) for kind in kinds[argument]):
                expected = " or ".join(kinds[argument])
                raise TypeError(f"{name}: argument {argument!r} must be {expected}, found {_describe(value)}")
        bound.apply_defaults()
        CALL_COUNTS[name] += 1
        try:
            if not takes_all:
                _demand_defaults(bound.arguments.keys() - used - ignored, bound.arguments, signature)
            return function(**{key: value for key, value in bound.arguments.items() if takes_all or key in used})
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    vars(call).update(schemas=schemas, __signature__=signature)
    return call


def _describe(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {sorted({type(entry).__name__ for entry in value})}"
    return "a tensor" if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value!r}"


def _demand_defaults(names: Iterable[str], given: Mapping[str, Any], signature: Signature) -> None:
    """Raise ValueError unless each argument of `names`, which a reference does not take, is None or its default."""
    wrong = []
    for name in sorted(names):
        value, default = given[name], signature.parameters[name].default
        is_tensor = isinstance(value, torch.Tensor)
        if value is not None and (is_tensor or value != default):
            wrong.append(f"{name}={'a tensor' if is_tensor else repr(value)} (default {default!r})")
    demand(not wrong, f"arguments that are not supported must keep their defaults, found {', '.join(wrong)}")


def with_shapes(shapes: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """Decorate a reference that reads tensor values: for fake tensors, call `shapes` to get empty outputs instead.

    `shapes` takes the same arguments. torch_npu registers a Meta kernel for each op, so that Dynamo sees it as one node
    of known shapes.
    """

    def decorate(reference: Callable) -> Callable:
        @functools.wraps(reference)
        def call(**given: Any) -> Any:
            from torch._subclasses.fake_tensor import FakeTensor

            tensors = (x[0] if isinstance(x, (list, tuple)) and len(x) else x for x in given.values())
            fake = any(isinstance(x, FakeTensor) for x in tensors)
            return shapes(**given) if fake else reference(**given)

        return call

    return decorate
