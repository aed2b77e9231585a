"""Test that upstream is cited by symbols that exist in the pinned sources, never by file and line."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.symbols import symbol_source
from verl_patches.catalog import all_rows
from verl_patches.patching.contract import installed_root
from verl_patches.patching.spec import LINES

ROOT = Path(__file__).resolve().parents[2]
CITING = ("verl_patches", "scripts", "configs", "docs", "README.md", "README_zh.md")
SUFFIXES = (".py", ".sh", ".yaml", ".md")
LINE_NUMBER = re.compile(r"[\w./-]*\w\.py:\d+|(?<=[\s(,]):\d{2,}(?:-\d+)?(?=[\s),.;])")  # `a/b.py:7`, and `(:12-17)`
SYMBOL = re.compile(
    r"(?<![\w./-])(?:verl|megatron|mindspeed|mindspeed_llm|vllm|vllm_ascend)(?:\.(?!py\b)[A-Za-z_]\w*)+"
)
PRINTED = {"/data/own.py:7"}  # in an example of an error
NO_SOURCE = {"vllm_ascend.vllm_ascend_C", "vllm.general_plugins"}  # compiled, and a group of entry points
INSTALLED = {name: installed_root(name) for name in ("verl", "megatron", "vllm")}


def citing_files() -> list[Path]:
    paths = [ROOT / name for name in CITING]
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in files if file.suffix in SUFFIXES]


def prose(file: Path) -> str:
    """Return the sentences of a file: of Python its comments and its strings with a space, of others all of it."""
    return "\n".join(sentences(file.read_text())) if file.suffix == ".py" else file.read_text()


def sentences(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def cited_symbols(text: str) -> set[str]:
    return set(SYMBOL.findall(text)) - NO_SOURCE


def is_defined(symbol: str, roots: Mapping[str, Path]) -> bool:
    """Return whether the sources define a symbol; roots: {package: the folder that holds it}."""
    package = symbol.partition(".")[0]
    return package in roots and symbol_source(symbol, roots[package]) != ""


def test_upstream_is_not_cited_by_lines():
    found = {
        str(file.relative_to(ROOT)): set(LINE_NUMBER.findall(file.read_text())) - PRINTED for file in citing_files()
    }
    assert len(found) > 100
    cited = {file: lines for file, lines in found.items() if lines}
    assert not cited
    assert LINE_NUMBER.findall("(config.py:695, :94; x[1, :10])") == ["config.py:695", ":94"]  # the control


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
    assert cited_symbols("\n".join(sentences(source))) == {"verl.utils.a", "verl.utils.b"}
