"""`status` and `report` on damaged files of a run: a sentence, text shown as text, never a traceback.

The commands are called as the command line calls them; any error but a sentence and an exit code fails the test.
"""

import json
import signal

import pytest
from matplotlib.image import imread

from tests.evaluation.test_report import run_of
from verl_patches.cli import live as view
from verl_patches.errors import interrupted
from verl_patches.evaluation import record
from verl_patches.weights.run_folders import take_start

HOSTILE = "a[red]b[/c]\x1b[31m\x07\r\u202e$\\frac|<b>\nok in 5 s"
DOING = {"step": 3, "steps": 9, "call": "reward", "phase": "reward", "since": 1e6, "step_since": 1e6}
ROW = {"id": "a.b", "state": "active", "target": "m:f", "process": "controller", "reason": ""}
FILES = {
    "summary.json": json.dumps(run_of(exit="running", patches=[ROW], versions={"a": "2"}, dirty={"verl": ["a.py"]})),
    "now.json": json.dumps(DOING),
    "progress.log": "| proven\n- row\n| step 2: a note\n",
}
CONTENT = {"empty": b"", "no JSON": b"{", "a list": b"[1]", "no UTF-8": b'{"run": "\xff\xfe"}'}
KINDS = ("truncated", "absent", "folder", *CONTENT)
COMMANDS = ("status {0}", "status {0} --json", "status {0} --watch", "status --run {0}", "status --run {0} --json")
REPORTS = ("report {0}", "report {0} --json", "report {1} {0}", "report {1} {0} --json")


@pytest.fixture
def run(tmp_path):
    """The folder of a run in its third step, and that of one that has ended."""
    folders = []
    for name, files in (("r", FILES), ("whole", {"summary.json": json.dumps(run_of("whole"))})):
        folders.append(tmp_path / name / take_start([tmp_path / name], None, None))
        for file, text in files.items():
            (folders[-1] / file).write_text(text)
    return tuple(folders)


def damage(path, kind):
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "absent":
        path.write_bytes(CONTENT.get(kind, content[: len(content) // 2]))


def strictly(text):
    """JSON as other programs read it: without NaN and Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def check(call, command, folders):
    """Call it: an answer, or one sentence; returns the exit code and all of its output."""
    code, out, err = call([word.format(*folders) for word in command.split()])
    if "--watch" in command and code == 130:
        assert err == f"verl_patches: {interrupted(signal.SIGINT)}\n"  # `once` ends the view so
        code, err = 0, ""
    assert code in (0, 1, 2) and not set("\x1b\x07\r\u202e") & set(out + err), (code, out, err)
    refused = err.startswith("verl_patches: ")  # with 1 where a run has no step, or no row, to show
    assert code > 0 if refused else code < 2 and "Traceback" not in err, err
    if "--json" in command:
        assert not out if refused else strictly(out), out
    return code, out + err


@pytest.fixture
def once(monkeypatch):
    """`status --watch` looks once more, and then its user types Ctrl-C."""
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) > 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(view.time, "sleep", sleep)
    return naps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_a_sentence_that_names_it(call, once, run, file, kind):
    damage(run[0] / file, kind)
    for command in (*COMMANDS, *REPORTS):
        once.clear()
        code, text = check(call, command, run)
        read = file == "summary.json" or command in COMMANDS[:3]  # a log is damaged by its kind alone
        if read and kind != "absent" and (file != "progress.log" or kind == "folder"):
            assert code == 2 and str(run[0] / file) in text and len(text) < 2000, (command, text)
        elif command in COMMANDS[:3]:
            assert code == 0, (command, text)
    assert not list(run[1].glob("report*")) and (file != "summary.json" or not list(run[0].glob("report*")))


@pytest.mark.parametrize("kind", ["truncated", "absent"])
def test_a_file_that_is_damaged_while_it_is_watched_ends_the_view_with_a_sentence(call, monkeypatch, run, kind):
    naps = iter([lambda: damage(run[0] / "summary.json", kind)])

    def sleep(_):
        next(naps, lambda: signal.raise_signal(signal.SIGINT))()

    monkeypatch.setattr(view.time, "sleep", sleep)
    code, text = check(call, "status {0} --watch", run)
    assert code == (0 if kind == "absent" else 2) and ": running" in text


WRONG = {"steps": "text", "run": 7, "patches": [3], "exit": None, "versions": {"a": float("nan")}}


@pytest.mark.parametrize("key", WRONG)
def test_a_value_of_another_type_is_shown_or_refused(call, run, key):
    (run[0] / "summary.json").write_text(json.dumps(json.loads(FILES["summary.json"]) | {key: WRONG[key]}))
    for command in (COMMANDS[0], COMMANDS[3], *REPORTS[:2]):
        code, text = check(call, command, run)
        assert code < 2 or str(run[0] / "summary.json") in text, (command, text)


def test_names_and_messages_are_shown_as_text_in_tables_files_and_pictures(call, run):
    """Rich's markup, escapes of a terminal, Markdown, HTML and TeX in each text of a run."""
    summary = run_of(HOSTILE, exit=HOSTILE, patches=[{**ROW, "id": HOSTILE, "state": HOSTILE, "reason": HOSTILE}])
    summary |= {"line": HOSTILE, "layout": {"train": HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    summary |= {"dirty": {HOSTILE: [HOSTILE]}}
    (run[0] / "summary.json").write_text(json.dumps(summary))
    (run[0] / "progress.log").write_text(f"| {HOSTILE}\n".replace("\nok", " ok"))
    shown = r"a[red]b[/c]\x1b[31m\x07\r\u202e$\frac|<b>"
    for command in (*COMMANDS[:1], *COMMANDS[2:4], *REPORTS[::2]):
        code, text = check(call, command, run)
        assert code < 2 and shown in text.replace("\n", ""), (command, text)
        assert "\nok in 5 s" not in text.replace("ended: ", "") or command.startswith("status --run"), text
    markdown = (run[0] / "report.md").read_text()
    assert r"\frac&#124;&lt;b&gt;\nok" in markdown and "<b>" not in markdown
    assert all(line[0] in "|#" for line in markdown.splitlines() if "[red]" in line)
    assert imread(run[0] / "report.png").ndim == 3


def test_a_sentence_about_a_folder_of_a_hostile_name_is_text(call, tmp_path):
    for name in ("a\x1b[31m[red]", b"\xff".decode(errors="surrogateescape"), "x" * 300, "a/" * 3000):
        for command in ("status {0}", "report {0}"):
            assert check(call, command, [str(tmp_path / name).replace(" ", "_")])[0] == 2


def test_a_record_of_a_real_run_is_read_as_it_was_written(run):
    """The control: nothing of a whole file is refused, cut or changed, but what no command shows."""
    name = '"run": "\\u8fd0\\u884c\\u3000x", "more": 1'
    (run[0] / "summary.json").write_text(FILES["summary.json"].replace('"run": "a"', name))
    read, written = record.read_summary(run[0]), json.loads(FILES["summary.json"])
    assert read.pop("run") == "运行\u3000x" and written.pop("run") and read == {k: written[k] for k in read}
    assert read.keys() == written.keys()
