"""What fetch-upstream makes of the contract check over the trees that it has made."""



from tests.cluster.small_upstream import line_of, run
from verl_patches.cluster import fetch as fetch_module
from verl_patches.cluster.fetch import fetch_upstream
from verl_patches.cluster.pins import load_pins
from verl_patches.patching.contract import PACKAGES


def test_what_the_check_says_decides(upstream, dest, monkeypatch):
    row = {"name": "a.row", "state": "problem", "where": "f.py:3", "expected": "x", "found": "y", "todo": "z",
           "details": ["statement"]}
    counts = {"fine": 1, "note": 0, "problem": 1}
    pin = upstream.pin(upstream.first)
    for said, states in (
        ({"state": "problem", "counts": counts, "rows": [row]}, {"check": "problem", "a.row": "problem"}),
        ({"state": "fine", "counts": counts, "rows": []}, {"check": "fine"}),
        ("check ended with 2: why", {"check": "problem"}),
    ):
        monkeypatch.setattr(fetch_module, "_check_report", lambda line, dest, said=said: said)
        report, found = run(dest, pin)
        assert {name: found[name].state for name in states} == states
        assert report.exit_code == ("problem" in states.values())


def test_the_check_runs_only_over_a_whole_line(upstream, dest):
    pins = {"verl": upstream.pin(upstream.first), "second": upstream.pin(upstream.second, packages=[])}
    report = fetch_upstream("test", line_of(**pins), dest, only=["verl"])
    assert report.exit_code == 0
    assert report.findings[-1].state == "note" and "no second" in report.findings[-1].found


def test_the_real_check_is_understood(tmp_path):
    """Over packages without a module: every row of the line is a problem, and each becomes a finding of ours."""
    for package in PACKAGES["pypi"]:
        (tmp_path / package).mkdir()
    first, *problems = fetch_module._checked("pypi", load_pins().line("pypi"), tmp_path)
    assert first.state == "problem" and first.found.endswith("problem") and "check --upstream" in first.todo
    assert "model.config" in {finding.name for finding in problems} and {f.state for f in problems} == {"problem"}


def test_a_check_that_cannot_run_says_why(tmp_path):
    assert "expected one of pypi, a3" in fetch_module._check_report("nonsense", tmp_path)
