"""Test README and docs: links and files exist, README stays short, Chinese pages follow the English ones."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "data" / "README.md"])
MAX_README_LINES = 180
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")


def anchors(text):
    """Return GitHub's anchors of a page: headings in lower case, words joined by "-", punctuation dropped."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).replace(" ", "-")
        found.append(slug + (f"-{found.count(slug)}" if slug in found else ""))
    return found


def broken_links(page, text):
    """Return relative links of a page to missing files of the repository or missing headings."""
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(text if target == page else target.read_text())):
            broken.append(link)
    return broken


def missing_files(text):
    """Return missing files and test functions that a page names in `code`, except its examples."""
    named = re.findall(
        r"`((?:verl_patches|tests|scripts|configs|data|docs)/[\w./-]+\.(?:py|sh|yaml|json|md))[`:]", text
    )
    missing = [name for name in named if not (ROOT / name).exists() and f"<!-- example: {name} -->" not in text]
    for file, function in re.findall(r"`(tests/[\w./-]+\.py)::(\w+)`", text):
        if (ROOT / file).exists() and f"\ndef {function}(" not in (ROOT / file).read_text():
            missing.append(f"{file}::{function}")
    return missing


def test_files_that_pages_name_exist():
    assert {page.name: missing for page in PAGES if (missing := missing_files(page.read_text()))} == {}
    gone = ["tests/model/test_gone.py", "tests/conftest.py::run_nothing"]
    assert missing_files("`tests/model/test_gone.py`, `tests/conftest.py`, `tests/conftest.py::run_nothing`") == gone


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_exist(page):
    assert broken_links(page, page.read_text()) == []


def test_pages_have_links_and_the_readmes_are_short():
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 100
    for name in ("README.md", "README_zh.md"):
        assert len((ROOT / name).read_text().splitlines()) <= MAX_README_LINES


CHINESE = [ROOT / "README_zh.md", *sorted((ROOT / "docs" / "zh").glob("*.md"))]


def english(page):
    """Return the English page that a Chinese one follows."""
    return ROOT / "README.md" if page.name == "README_zh.md" else ROOT / "docs" / page.name


def not_in_english(text, original):
    """Return commands, figures and `code` of a Chinese page that its English page does not have."""
    lines = [
        [line.split("  #")[0].rstrip() for _, body in FENCE.findall(page) for line in body.splitlines()]
        for page in (text, original)
    ]
    found = [line for line in lines[0] if not line.startswith("# ") and line not in lines[1]]
    spans, original_spans = CODE.findall(FENCE.sub("", text)), " ".join(original.split())
    found += [span for span in spans if span not in original_spans]
    figures = [re.findall(r"\d+(?:[.,]\d+)*(?:e-?\d+)?", LINK.sub("", page)) for page in (text, original)]
    return found + sorted({*figures[0]} - {*figures[1]})


def english_links(page, text):
    """Return links of a Chinese page to English pages that have a Chinese one, except its own."""
    targets = {(page.parent / link.partition("#")[0]).resolve(): link for link in LINK.findall(FENCE.sub("", text))}
    return [targets[english(other)] for other in CHINESE if other != page and english(other) in targets]


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_has_the_commands_and_figures_of_the_english_one(page):
    text, original = page.read_text(), english(page).read_text()
    assert not_in_english(text, original) == [] and english_links(page, text) == []


def test_both_runbooks_name_the_same_commits():
    pages = [(ROOT / "docs" / name).read_text() for name in ("256-die-runbook.md", "zh/256-die-runbook.md")]
    commits, chinese = ({*re.findall(r"\b[0-9a-f]{40}\b", text)} for text in pages)
    assert commits and commits == chinese


def test_what_only_a_chinese_page_has_is_found():
    original = "```bash\npython a.py    # runs 3 times\n```\n`a.key` is 1.5\n"
    assert not_in_english("```bash\n# 三次\npython a.py    # 运行 3 次\n```\n`a.key` 为 1.5\n", original) == []
    text = "```bash\npython b.py\n```\n`a.keys` 为 1.6\n"
    assert not_in_english(text, original) == ["python b.py", "a.keys", "1.6"]
    text = "[a](../one-node.md#start) [b](../256-die-runbook.md) [c](../patches.md) [d](memory.md)"
    assert english_links(ROOT / "docs/zh/256-die-runbook.md", text) == ["../one-node.md#start"]


@pytest.mark.parametrize("link", ["gone.md", "README.md#gone", "#gone", "docs/gone.png"])
def test_a_broken_link_is_found(link):
    text = f"# Here\n[a](LICENSE) [b](https://example.org/x) [c](#here) [d]({link})\n```text\n[e](gone)\n```\n"
    assert broken_links(ROOT / "README.md", text) == [link]
