"""configs/requirements-a3.txt: every package of the image of line a3 has a file for aarch64 and both Pythons, still."""

import lock_a3
import pytest
from packaging.utils import canonicalize_name

from tests.scripts.test_requirements import requirements
from verl_patches.upstream.pins import load_pins, same_version

A3 = load_pins().line("a3")


@pytest.mark.parametrize("python", A3.python)
def test_the_lock_has_the_pins_and_meets_our_requirements(python):
    found = lock_a3.locked(python)
    built = {"apex", *A3.repositories}  # from sources
    pins = {canonicalize_name(name): version for name, version in A3.packages.items() if name not in built}
    assert {name: found.get(name) for name, v in pins.items() if not same_version(v, found.get(name, ""))} == {}
    assert [r for name, r in requirements().items() if not r.specifier.contains(found[name])] == []
    assert len(found) > 150 and not built & set(found) and not [name for name in found if name.startswith("nvidia")]


def test_a_package_that_differs_between_the_pythons_has_a_marker(monkeypatch, tmp_path):
    found = {"3.10": {"a": "1", "b": "1", "only": "3"}, "3.11": {"a": "1", "b": "2"}}
    text = lock_a3.text_of(found)
    assert text.splitlines()[-4:] == [
        "a==1",
        'b==1 ; python_version == "3.10"',
        'b==2 ; python_version == "3.11"',
        'only==3 ; python_version == "3.10"',
    ]
    monkeypatch.setattr(lock_a3, "LOCK", tmp_path / "lock.txt")
    lock_a3.LOCK.write_text(text)
    assert {python: lock_a3.locked(python) for python in found} == found


@pytest.fixture
def reachable():
    """Skips where the index cannot be asked."""
    try:
        lock_a3.resolve(["wheel"], "3.11")
    except lock_a3.NotReachable as error:
        pytest.skip(f"index not reachable: {str(error)[-200:]}")


@pytest.mark.nightly
@pytest.mark.upstream
def test_it_resolves_to_the_same_again(reachable, request, capsys):
    code = lock_a3.main(["--upstream", str(request.config.getoption("--upstream"))])
    assert code == 0, capsys.readouterr()
