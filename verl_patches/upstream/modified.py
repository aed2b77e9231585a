"""Find upstream sources that differ from their pins: checkouts by git, installed packages by their version.

A checkout is as pinned if it is at the commit of its pin and `git status` names no file. The prelude line, which
`install-prelude` inserts into verl's worker module, is no change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from verl_patches.errors import ConfigError, RecipeError, our_command
from verl_patches.patching.boot import install_prelude
from verl_patches.patching.contract import PACKAGES, installed_root
from verl_patches.patching.report import Finding
from verl_patches.spec import RunSpec, Trees
from verl_patches.upstream.checkouts import FETCH_HINT, git, head_commit
from verl_patches.upstream.pins import Line, Repository, load_pins, same_version

WORKER_FILE = f"verl/{install_prelude.WORKER_FILE}"
_SHOWN_FILES = 5  # files that are shown of a long list


def refuse_modified(run: RunSpec) -> dict[str, list[str]]:
    """Return {repository or package: files that are not as pinned} of the sources that a run imports.

    Raises ConfigError that names them where recipe.drift is strict. With warn the run starts, and its summary lists
    them as `dirty`.
    """
    recipe = run.recipe
    line, roots = load_pins().line(recipe.line), package_roots(recipe.line, run.trees)
    absent = [package for package in PACKAGES[recipe.line] if package not in roots]
    if absent and recipe.platform == "npu":
        raise ConfigError(
            f"{', '.join(absent)}: expected in this Python or in the folder of --upstream, found in "
            f"neither; run this in the image of the line; {FETCH_HINT}"
        )
    problems = [f for f in source_findings(line, roots) if f.state == "problem"]
    if problems and recipe.drift == "strict":
        raise ConfigError(
            "the upstream sources are not as pinned, so this run is not started:\n  "
            + "\n  ".join(f"{f.name} ({f.where}): {f.found}; {f.todo}" for f in problems)
            + "\nrecipe.drift=warn (without the launcher: drift=warn in VERL_PATCHES) starts the run "
            "and records it as dirty"
        )
    return {f.name: [*(f.details or (f.found,))] for f in problems}


def package_roots(line: str, trees: Trees) -> dict[str, Path]:
    """Return {top-level package of `line`: the folder that holds it}, in the trees, else in this interpreter."""
    tree_roots = {
        package: folder for folder in trees.folders for package in PACKAGES[line] if (folder / package).is_dir()
    }
    roots = {package: tree_roots.get(package) or installed_root(package) for package in PACKAGES[line]}
    return {package: root for package, root in roots.items() if root is not None}


def source_findings(line: Line, roots: Mapping[str, Path]) -> Iterator[Finding]:
    """Yield one finding per package of `roots`: compare a checkout's commit and files, an installed package's version.

    A finding is named as in the pin file. It is a problem where files differ (all are in `details`), where commit or
    version differs, and where a repository of the line has nothing to compare with.
    """
    pins = {package: (name, pin) for name, pin in line.repositories.items() for package in pin.packages}
    for package, root in roots.items():
        name, pin = pins.get(package, (package, None))
        if pin is not None and (root / ".git").exists():
            yield _tree_finding(name, root.resolve(), pin)
        else:
            yield _package_finding(name, package, root, line)


def _tree_finding(name: str, folder: Path, pin: Repository) -> Finding:
    expected = f"commit {pin.commit[:12]}"
    todo = (
        f"git -C {folder} diff {pin.commit[:12]} shows the changes, git -C {folder} stash -u saves and removes them; "
        f"{our_command('fetch_upstream.sh', '--dest', 'ANOTHER')} brings the pinned sources"
    )
    try:
        head, files = head_commit(folder), tree_changes(folder)
    except RecipeError as error:
        return Finding(name, "problem", str(folder), expected, f"cannot be compared: {error}", todo)
    found = [] if head == pin.commit else [f"expected commit {pin.commit}, found {head}"]
    found += [files_text(files)] if files else []
    if found:
        return Finding(name, "problem", str(folder), expected, "; ".join(found), todo, tuple(files))
    return Finding(name, "fine", str(folder), expected, f"{pin.commit[:12]}, every file as pinned")


def files_text(files: Sequence[str]) -> str:
    """Return the number of changed files and the first few of them, as text."""
    more = f" and {len(files) - _SHOWN_FILES} more" if len(files) > _SHOWN_FILES else ""
    noun = "files" if len(files) > 1 else "file"
    return f"{len(files)} {noun} changed: {', '.join(files[:_SHOWN_FILES])}{more}"


def tree_changes(folder: Path) -> list[str]:
    """Return ["FILE (modified)", "FILE (deleted)", "FILE (extra)", ...] of a work tree against its HEAD.

    The inserted prelude line is no change. Files that git ignores are left out.
    """
    changes = []
    for entry in git(folder, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").split("\0")[:-1]:
        code, path = entry[:2], entry[3:]
        if path == WORKER_FILE and _has_prelude_alone(folder):
            continue
        change = "deleted" if "D" in code else "modified"
        changes.append(f"{path} ({'extra' if code == '??' else change})")
    return sorted(changes)


def _has_prelude_alone(folder: Path) -> bool:
    """Return whether verl's worker file differs from HEAD only by the inserted prelude line."""
    counts = git(folder, "diff", "--numstat", "HEAD", "--", WORKER_FILE).split()[:2]
    return counts == ["1", "0"] and install_prelude.PRELUDE_LINE in (folder / WORKER_FILE).read_text().splitlines()


def _package_finding(name: str, package: str, root: Path, line: Line) -> Finding:
    """Compare the version of a package that is not a git checkout; a copy that is not installed has none."""
    place, pin = str(root / package), line.repositories.get(name)
    distributions = metadata.packages_distributions().get(package, ()) if root == installed_root(package) else ()
    if not distributions and pin:
        text = "neither a git checkout nor an installed package: cannot be compared"
        return Finding(name, "problem", place, f"commit {pin.commit[:12]}", text, FETCH_HINT)
    if not distributions:
        return Finding(name, "note", place, found="not installed in this Python: its files were not compared")
    distribution, version = distributions[0], metadata.version(distributions[0])
    pinned = pin.version if pin else line.packages.get(distribution, version)
    source = f"git+{pin.urls[0]}@{pin.commit}" if pin else f"{distribution}=={pinned}"
    again = f"install it again: python -m pip install --force-reinstall --no-deps {source}"
    fits, unknown = same_version(pinned, version), "; its commit is not known" if pin else ""
    found = f"{distribution} {version}{unknown}"
    return Finding(
        name if pin else distribution, "fine" if fits else "problem", place, pinned, found, "" if fits else again
    )
