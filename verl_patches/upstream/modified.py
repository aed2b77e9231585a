"""Find files of the upstream sources that differ from their pins: in checkouts by git, in installed packages by RECORD.

A checkout is as pinned if it is at the commit of its pin and `git status` names no file. For an installed package the
RECORD itself is compared first, with the digests of the pinned wheels' RECORDs in the pin file. The prelude line, which
`install-prelude` inserts into verl's worker module, is no change.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from verl_patches.errors import ConfigError, RecipeError, our_command
from verl_patches.patching.boot import install_prelude
from verl_patches.patching.contract import PACKAGES, installed_root
from verl_patches.patching.report import Finding
from verl_patches.spec import RunSpec, Trees
from verl_patches.upstream.checkouts import FETCH_HINT, SETUP_HINT, git, head_commit
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
    """Yield one finding per package of `roots`: compare a checkout with its pin, an installed package with its RECORD.

    A finding is named as in the pin file. It is a problem where files differ (all are in `details`), where commit or
    version differs, and where there is nothing to compare with.
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
    place, pin = str(root / package), line.repositories.get(name)
    record = _find_record(package, root)
    if record is None and pin is None:  # a copy of the package: compare with the installed one's RECORD
        record = _find_record(package, installed_root(package))
    if record is None:
        wanted, todo = "an installed package", SETUP_HINT
        if pin:
            wanted, todo = f"commit {pin.commit[:12]}", FETCH_HINT
        text = "neither a git checkout nor an installed package with a RECORD: cannot be compared"
        return Finding(name, "problem", place, wanted, text, todo)
    distribution, _, version = record.parent.name.removesuffix(".dist-info").replace("_", "-").rpartition("-")
    pinned = pin.version if pin else line.packages.get(distribution, version)
    name, wanted = name if pin else distribution, f"{pinned}, {pin.commit[:12]}" if pin else pinned
    source = f"git+{pin.urls[0]}@{pin.commit}" if pin else f"{distribution}=={pinned}"
    again = f"install it again: python -m pip install --force-reinstall --no-deps {source}"
    if not same_version(pinned, version):
        return Finding(name, "problem", place, wanted, version, again)
    if pin is None and (found := record_digest(package, record)) not in line.records.get(distribution, ()):
        text = f"{record} is not that of the pinned wheel: its digest is {found}"
        return Finding(name, "problem", place, " or ".join(line.records.get(distribution, ())), text, again)
    if files := record_changes(package, root, record):
        return Finding(name, "problem", place, wanted, files_text(files), again, tuple(files))
    unknown = "; its commit is not known" if pin else ""
    return Finding(name, "fine", place, wanted, f"{distribution} {version}, every file as its RECORD says{unknown}")


def _find_record(package: str, root: Path | None) -> Path | None:
    """Return the RECORD in `root` that lists files of a top-level package."""
    listed = re.compile(rf"^{re.escape(package)}/", re.MULTILINE)
    records = sorted(root.glob("*.dist-info/RECORD")) if root else ()
    return next((record for record in records if listed.search(record.read_text())), None)


def record_digest(package: str, record: Path) -> str:
    """Return the sha256 of a package's sorted lines "PATH,HASH" in a RECORD, equal for the wheel and an installation.

    Lines that pip adds do not count: other folders (dist-info, scripts), and byte code, which has no hash.
    """
    lines = sorted(f"{path},{digest}\n" for path, digest in _wheel_files(package, record).items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _wheel_files(package: str, record: Path) -> dict[str, str]:
    """Return {path: hash} of the files of a top-level package that a wheel brought."""
    with record.open(newline="") as text:
        rows = [(path, digest) for path, digest, *_ in csv.reader(text) if path.startswith(f"{package}/")]
    return {path: digest for path, digest in rows if digest}


def record_changes(package: str, root: Path, record: Path) -> list[str]:
    """Return the files of a package in `root` that differ from its RECORD, as `tree_changes` does.

    Extra files count where Python imports them.
    """
    wanted, changes = _wheel_files(package, record), []
    for path, digest in wanted.items():
        if not (root / path).is_file():
            changes.append(f"{path} (deleted)")
            continue
        found = [(root / path).read_bytes()]
        if path == WORKER_FILE:
            found.append(found[0].replace(f"{install_prelude.PRELUDE_LINE}\n".encode(), b"", 1))
        if digest not in map(_record_hash, found):
            changes.append(f"{path} (modified)")
    others = {f.relative_to(root).as_posix() for f in (root / package).rglob("*") if f.suffix in (".py", ".so")}
    return sorted([*changes, *(f"{path} (extra)" for path in others - wanted.keys())])


def _record_hash(data: bytes) -> str:
    """Return a hash in the form of RECORD files: sha256=urlsafe base64 without padding."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
