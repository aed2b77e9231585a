"""Test that every package of configs/requirements-a3.txt still has a file for aarch64 and both Pythons."""

import lock_a3
import lock_hashes
import pytest
from packaging.utils import canonicalize_name

from tests.scripts.test_requirements import requirements
from verl_patches.upstream.pins import load_pins, same_version

A3 = load_pins().line("a3")


@pytest.mark.parametrize("python", A3.python)
def test_the_lock_has_the_pins_and_meets_our_requirements(python):
    found = lock_a3.locked_versions(python)
    built = {"apex", *A3.repositories}  # from sources
    pins = {canonicalize_name(name): version for name, version in A3.packages.items() if name not in built}
    assert {name: found.get(name) for name, v in pins.items() if not same_version(v, found.get(name, ""))} == {}
    assert [r for name, r in requirements().items() if not r.specifier.contains(found[name])] == []
    assert len(found) > 150 and not built & set(found) and not [name for name in found if name.startswith("nvidia")]


def test_a_package_that_differs_between_the_pythons_has_a_marker(monkeypatch, tmp_path):
    found = {"3.10": {"a": "1", "b": "1", "only": "3"}, "3.11": {"a": "1", "b": "2"}}
    hashes = {"3.10": {"a": {"x", "y"}, "b": {"z"}, "only": {"w"}}, "3.11": {"a": {"x"}, "b": {"v"}}}
    text = lock_a3.lock_text(found, hashes)
    assert text.replace(" \\\n   ", "").splitlines()[-4:] == [
        "a==1 --hash=sha256:x --hash=sha256:y",
        'b==1 ; python_version == "3.10" --hash=sha256:z',
        'b==2 ; python_version == "3.11" --hash=sha256:v',
        'only==3 ; python_version == "3.10" --hash=sha256:w',
    ]
    monkeypatch.setattr(lock_a3, "LOCK_FILE", tmp_path / "lock.txt")
    lock_a3.LOCK_FILE.write_text(text)
    assert {python: lock_a3.locked_versions(python) for python in found} == found


def test_every_pin_of_both_lines_has_its_hashes_and_the_files_stay_readable():
    texts = [path.read_text() for path in (lock_a3.LOCK_FILE, *lock_hashes.FILES)]
    for text in texts:
        pins = [line for line in lock_hashes.without_hashes(text).splitlines() if not line.startswith("#")]
        entries = [entry for entry in text.replace(" \\\n", "").splitlines() if not entry.startswith("#")]
        assert len(pins) == len(entries) and all("--hash=sha256:" in entry for entry in entries)
    assert sum(len(text.splitlines()) for text in texts) <= 1500
    assert lock_hashes.without_hashes("a==1 \\\n    --hash=sha256:b \\\n    --hash=sha256:c\nd==2\n") == "a==1\nd==2\n"


def test_hashes_are_those_of_files_that_pip_may_choose():
    def file(name):
        return {"name": f"a-1-{name}", "hashes": {"sha256": name}}

    fits = ["py3-none-any.whl", "cp38-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"]
    fits += [f"cp311-cp311-manylinux_2_28_{machine}.whl" for machine in lock_hashes.MACHINES]
    others = ["cp310-cp310-linux_x86_64.whl", "cp311-cp311-musllinux_1_2_x86_64.whl", "cp311-cp311-win_amd64.whl"]
    package = {"name": "a", "version": "1", "wheels": [*map(file, fits), *map(file, others)], "sdist": file("sdist")}
    assert lock_hashes._hashes(package, "3.11") == set(fits)
    assert lock_hashes._hashes({**package, "wheels": [file(fits[-1])]}, "3.11") == {fits[-1], "sdist"}
    with pytest.raises(lock_hashes.NoFileError, match="a==1: expected a wheel of Python 3.11"):
        lock_hashes._hashes({"name": "a", "version": "1", "wheels": [file(others[0])]}, "3.11")


def test_without_write_later_files_change_nothing_and_a_hash_that_has_gone_does():
    text = "# pins\na==1 \\\n    --hash=sha256:x \\\n    --hash=sha256:y\n"
    assert lock_hashes.rewrite_hashes(text, lambda pins: {"a": {"x", "y", "z"}}, write=False) == text
    assert "sha256:z" in lock_hashes.rewrite_hashes(text, lambda pins: {"a": {"x", "y", "z"}}, write=True)
    assert "sha256:y" not in lock_hashes.rewrite_hashes(text, lambda pins: {"a": {"x"}}, write=False)


@pytest.fixture
def reachable():
    """Skip the test if the package index cannot be reached."""
    try:
        lock_a3.resolve(["wheel"], "3.11")
    except lock_a3.UnreachableError as error:
        pytest.skip(f"index not reachable: {str(error)[-200:]}")


@pytest.mark.nightly
@pytest.mark.upstream
def test_it_resolves_to_the_same_again(reachable, request, capsys):
    code = lock_a3.main(["--upstream", str(request.config.getoption("--upstream"))])
    assert code == 0, capsys.readouterr()


@pytest.mark.nightly
def test_line_pypi_has_the_hashes_of_the_index_again(reachable, capsys):
    assert lock_hashes.main([]) == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("HTTP status client error (404 Not Found) for url (http://host/a.whl)", lock_a3.NoFileError),
        ("HTTP status server error (503 Service Unavailable) for url (http://host/a.whl)", lock_a3.UnreachableError),
        ("error sending request for url (http://host/a.whl)", lock_a3.UnreachableError),
    ],
)
def test_a_file_that_an_index_lacks_is_no_index_that_does_not_answer(cause, kind):
    assert type(lock_hashes._uv_error(f"error: Failed to fetch: http://host/a.whl\n  cause: {cause}")) is kind
    assert type(lock_hashes._uv_error("no solution found: a has no wheels")) is lock_a3.NoFileError
