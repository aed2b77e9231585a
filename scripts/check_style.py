"""Check the sentences, names and citations of this repository's files against its rules.

    python scripts/check_style.py [--since REVISION | FILE ...]

Without arguments all files are checked, as CI does. Each fault is one line, FILE:LINE: RULE: what was found.
Rules: a docstring begins with a whole sentence; a function's name has a noun (not of_x or x_of); upstream is cited by
symbols, not by file and line; sentences use none of the phrases of PHRASES.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("verl_patches", "scripts", "configs", "data", "tests", "docs", "README.md", "README_zh.md")
SUFFIXES = (".py", ".sh", ".yaml", ".md")
CITING = ("verl_patches/", "scripts/", "configs/", "docs/", "README")  # not tests/, which quote FILE:LINE of errors
# a capital or a quoted name at the beginning, no preposition, question word or error, and an end
SENTENCE = re.compile(
    r"(?!(?:Of|What|Whose|Whether|Where|With|As|By|In|On|From|To|\w*Error|Row provider)\b)[A-Z`].*[.:]`?$"
)
WITHOUT_NOUN = re.compile(r"_*(?:of|of_\w+|\w+_of)_*$")
LINE_NUMBER = re.compile(r"[\w./-]*\w\.py:\d+|(?<=[\s(,]):\d{2,}(?:-\d+)?(?=[\s),.;])")  # a file's, and alone `(:7-9)`
PRINTED = {"/data/own.py:7"}  # in an example of an error
PHRASES = re.compile(
    r"\b(?:but of what|what is no\b|that is for good|(?:is|are) none of|has not said so|whose an? \w+ is|none that)",
    re.IGNORECASE,
)
EXAMPLES = ("scripts/check_style.py", "tests/scripts/test_style.py")  # contain the phrases


class Fault(NamedTuple):
    """Describe one place that breaks a rule."""

    line: int
    rule: str
    found: str


def docstring_faults(tree: ast.AST) -> Iterator[Fault]:
    """Yield the docstrings whose first sentence does not begin as one, or does not end."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if first and not SENTENCE.match(first):
                yield Fault(getattr(node, "lineno", 1), "docstring", first)


def name_faults(tree: ast.AST) -> Iterator[Fault]:
    """Yield the functions whose name is a genitive."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and WITHOUT_NOUN.match(node.name):
            yield Fault(node.lineno, "name", node.name)


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the comments of Python source, and of its strings that have a space."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def citation_faults(text: str) -> Iterator[Fault]:
    """Yield the citations of a file and its line."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in LINE_NUMBER.findall(line):
            if found not in PRINTED:
                yield Fault(number, "citation", found)


def phrase_faults(texts: Iterable[tuple[int, str]]) -> Iterator[Fault]:
    """Yield the phrases that readers did not understand."""
    for number, text in texts:
        for found in PHRASES.findall(text):
            yield Fault(number, "phrase", found)


def faults(name: str, text: str) -> list[Fault]:
    """Return the faults of a file's text; `name` is its path in the repository."""
    found: list[Fault] = []
    if name.startswith(CITING):
        found += citation_faults(text)
    if name.endswith(".py"):
        tree = ast.parse(text)
        found += name_faults(tree)
        if name not in EXAMPLES:
            found += phrase_faults(sentences(text))
        if name.startswith(("verl_patches/", "scripts/")):
            found += docstring_faults(tree)
    return sorted(found)


def all_files() -> list[str]:
    """Return the paths in the repository of the files that have rules."""
    found = [file for name in CHECKED for file in [ROOT / name, *(ROOT / name).rglob("*")]]
    return sorted(str(file.relative_to(ROOT)) for file in found if file.suffix in SUFFIXES)


def changed_files(revision: str) -> list[str]:
    """Return the paths in the repository of the files that have rules and differ from a git revision."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", revision, "--", *CHECKED]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if name.endswith(SUFFIXES)]


def main() -> int:
    """Print the faults; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--since", metavar="REVISION", help="check the files that differ from this git revision")
    given = parser.parse_args()
    names = [str(Path(file).resolve().relative_to(ROOT)) for file in given.files]
    if given.since:
        names = changed_files(given.since)
    elif not names:
        names = all_files()
    count = 0
    for name in names:
        for fault in faults(name, (ROOT / name).read_text()):
            print(f"{name}:{fault.line}: {fault.rule}: {fault.found}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    raise SystemExit(main())
