"""Test that the upstream symbols that this repository cites exist in the pinned sources."""

import re
from collections.abc import Mapping
from pathlib import Path

import check_style
import pytest

from tests.symbols import symbol_source
from verl_patches.catalog import all_rows
from verl_patches.patching.contract import installed_root
from verl_patches.patching.spec import LINES

ROOT = Path(__file__).resolve().parents[2]
SYMBOL = re.compile(
    r"(?<![\w./-])(?:verl|megatron|mindspeed|mindspeed_llm|vllm|vllm_ascend)(?:\.(?!py\b)[A-Za-z_]\w*)+"
)
NO_SOURCE = {"vllm_ascend.vllm_ascend_C", "vllm.general_plugins"}  # compiled, and a group of entry points
INSTALLED = {name: installed_root(name) for name in ("verl", "megatron", "vllm")}


def citing_files() -> list[Path]:
    return [ROOT / name for name in check_style.all_files() if name.startswith(check_style.CITING)]


def prose(file: Path) -> str:
    """Return the sentences of a file: of Python its comments and its strings with a space, of others all of it."""
    text = file.read_text()
    return "\n".join(part for _, part in check_style.sentences(text)) if file.suffix == ".py" else text


def cited_symbols(text: str) -> set[str]:
    return set(SYMBOL.findall(text)) - NO_SOURCE


def is_defined(symbol: str, roots: Mapping[str, Path]) -> bool:
    """Return whether the sources define a symbol; roots: {package: the folder that holds it}."""
    package = symbol.partition(".")[0]
    return package in roots and symbol_source(symbol, roots[package]) != ""


@pytest.mark.upstream
def test_cited_symbols_are_in_the_pinned_sources(a3_sources):
    """Check that a row's sentences cite symbols of one of its lines, other sentences symbols of any line."""
    checkouts = a3_sources("verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM", "vllm-ascend")
    packages = ("verl", "megatron", "mindspeed", "mindspeed_llm", "vllm_ascend")
    roots = {"pypi": INSTALLED, "a3": dict(zip(packages, checkouts, strict=True)) | {"vllm": INSTALLED["vllm"]}}
    texts = [(row.id, f"{row.why}\n{row.exit}", row.lines) for row in all_rows()]
    texts += [(file.name, prose(file), LINES) for file in citing_files()]
    cited = {(where, symbol, tuple(lines)) for where, text, lines in texts for symbol in cited_symbols(text)}
    missing = [
        (where, name) for where, name, lines in cited if not any(is_defined(name, roots[line]) for line in lines)
    ]
    assert not missing
    assert len(cited) > 100


def test_a_symbol_that_the_sources_do_not_define_is_seen():
    assert is_defined("verl.utils.device", INSTALLED) and is_defined(
        "vllm.config.ModelConfig.get_vocab_size", INSTALLED
    )
    for symbol in ("verl.utils.gone", "vllm.config.ModelConfig.gone", "vllm.config.get_vocab_size", "mindspeed.utils"):
        assert not is_defined(symbol, INSTALLED)
    source = 'T = "verl.utils.a:A"\nWHY = "see "\\\n    "verl.utils.a."  # verl.utils.b and b.py\n'
    assert cited_symbols("\n".join(text for _, text in check_style.sentences(source))) == {
        "verl.utils.a",
        "verl.utils.b",
    }
