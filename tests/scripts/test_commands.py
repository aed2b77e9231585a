"""Test that every command of the pages works as printed, in a shell of its own after `source .venv/bin/activate`.

CLASSES gives the class of a ```bash block's command, which decides its test. Commands in running text may have
placeholders: their script, subcommand, options and our keys must exist.
"""

import ast
import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import typer

from tests.runs import composed
from tests.scripts.test_docs import CODE, FENCE, PAGES, ROOT
from verl_patches.__main__ import app
from verl_patches.cli.run import check_switches
from verl_patches.errors import ConfigError, our_command
from verl_patches.launch.smoke import SmokeOptions, smoke_overrides
from verl_patches.recipe import recipe_keys
from verl_patches.rules import RULES
from verl_patches.weights.run_folders import take_start

ENGLISH = [page for page in PAGES if "zh" not in (page.parent.name, page.stem[-2:])]  # Chinese pages have the same
FILES = ("checkpoints", "replay")  # checks that read what an earlier run of the same page leaves
UsageError = typer.BadParameter.__base__  # typer has a click of its own, and no public name for this
ACTIVATE = "source .venv/bin/activate"
OURS, TRAIN = "python -m verl_patches ", r"bash scripts/train_\w+\.sh "
# {class: what is tested; patterns of its commands, without variables in front}; the first that matches counts
CLASSES = {
    "example": (r".*finite_rewards",),  # tests/test_readme_example.py runs them
    "of a run": (rf"{OURS}(plan .*--lengths RUN|report start)",),  # tests/cli make such runs
    "run with sources": (rf"({TRAIN}--dry-run|{OURS}plan) .*--upstream upstream",),  # as run, with clones
    "run": (  # here; the exit code is 0, or N where the comment says "exits N"
        rf"{OURS}(status|explain|digest|report|compare|config|reshard-plan|versions|plan|check(?!.*--upstream))\b",
        rf"{OURS}cluster render ",
        rf"{TRAIN}--dry-run",
        rf"{OURS}data build data/sample\.yaml(?! input=mine)",
        r"python (-c|scripts/readme_tables\.py)",
        r"export \w+=|source ",
    ),
    "of a job": (r"bash outputs/job/(up|run|follow|logs|down)\.sh",),  # tests/launch/jobs runs them
    # a run, as tests/loop does: all checks of the config hold
    "start": (r"bash scripts/smoke\.sh", TRAIN[:-1], rf"{OURS}train(?!.*--dry-run) "),
    "parse": (
        r"(python|bash) ",
    ),  # needs minutes, a cluster, NPUs, weights, the network: file, options, values are right
    "foreign": (
        r"git |docker |sync; |hub/bin/|hf download |vllm serve |ray |python3 -c|\(|python=|env \$python",
    ),  # bash can read it
}
# scripts that pass all their arguments to a subcommand
SCRIPTS = {"smoke": ["smoke"]}
for run in ("random_init", "true_weight"):
    SCRIPTS[f"train_deepseekv3_256die_{run}"] = ["train", "--config-name", f"deepseekv3_256die_{run}"]
SCRIPTS["train_moonlight_16die"] = ["train", "--config-name", "moonlight_16die"]


# {words of a call of our_command, * for a value: a command with such words, which is run}
PRINTED = {
    "check * --write --line * *": "check update.recipe_by_default --write --line pypi",
    "doctor CONFIG --this-node": "doctor deepseekv3_tiny_cpu --this-node",
    "plan CONFIG": "plan deepseekv3_16die",
    "plan moonlight_16die": "plan moonlight_16die",
    "status": "status",
    "status *": "status smoke",
    "train --config-name * * *": "train --config-name deepseekv3_16die --dry-run",
    "train --config-name CONFIG": "train --config-name deepseekv3_tiny_cpu --dry-run",
    "* trainer.resume_mode=auto": "train --config-name deepseekv3_tiny_cpu trainer.resume_mode=auto --dry-run",
    "versions --line *": "versions --line pypi",
    "versions --line LINE": "versions --line pypi",
    # tests/cli/test_output.py reads the examples of --help
    "* *": None,
    # tests/cli/test_plan.py follows these from a plan
    "plan * --search --dies *": None,
    "plan * * * *": None,
    # parsed alone: they install, clone, or start a run
    "install-prelude": None,
    "install-prelude --undo": None,
    "fetch_upstream.sh --dest ANOTHER": None,
    "fetch_upstream.sh --dest DIR": None,
    "setup.sh": None,
    "smoke.sh": None,
    # tests/loop/test_bringup.py runs it with the tiny model
    "bringup deepseekv3_16die": None,
    # they need a run with responses or a checkpoint: tests/tools/data/test_from_rollouts.py, tests/loop/test_chains.py
    "smoke.sh *": None,
    "train --config-name CONFIG *": None,
    "eval * * *": None,
    "report *": None,
    "samples *": None,
    "weights export * *": None,
    "weights export * DIR": None,
}


def is_whole(text):
    """Return whether bash can read the text: no quote, parenthesis or here-document is open."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    return done.returncode == 0 and not done.stderr


def block_commands(text):
    """Return the commands of a page's ```bash blocks, each with its comment and all of its lines."""
    found = []
    for kind, body in FENCE.findall(text):
        lines = body.splitlines(keepends=True) if kind == "bash" else []
        while lines:
            count = next(n for n in range(1, len(lines) + 1) if n == len(lines) or whole_command(lines[:n]))
            command, lines = "".join(lines[:count]).strip(), lines[count:]
            if command and not command.startswith("#"):
                found.append(command)
    return found


def whole_command(lines):
    return not lines[-1].endswith("\\\n") and is_whole("".join(lines))


def plain(command):
    """Return a command on one line, without comment, variables in front, and the run.sh of a job that starts it."""
    line = re.sub(r"(^|\s)#.*", "", command.replace("\\\n", " ")).strip()
    line = re.sub(r"^bash outputs/job/run\.sh +(?=\w)", "", line)
    return re.sub(r"^([A-Z_]+=\S+ +)+(?=\S)", "", re.sub(r" +", " ", line))


def command_class(command):
    """Return the class of a command; None for a program that no page may name."""
    return next(
        (name for name, patterns in CLASSES.items() if any(re.match(p, plain(command)) for p in patterns)), None
    )


def inline_commands(text):
    """Return `python -m verl_patches ...`, `bash scripts/...` and `python FILE ...` of a page's running text."""
    command = re.compile(r"(?:python|bash) (?:-m verl_patches|scripts/|data/|tests/).*")
    return [match[0] for code in CODE.findall(FENCE.sub("", text)) if (match := command.search(code))]


def command_words(command):
    words = shlex.split(plain(command))
    ends = [number for number, word in enumerate(words) if word in ("&&", "|", ";", ">")]
    return words[: ends[0]] if ends else words


def command_arguments(words):
    """Return the words for our command line; None for another program."""
    if words[1] == "-m":
        return words[3:] if words[2] == "verl_patches" else None
    return SCRIPTS[Path(words[1]).stem] + words[2:] if Path(words[1]).stem in SCRIPTS else None


@cache
def command_line():
    return typer.main.get_command(app)


def parse(arguments):
    """Return the values of a command's options; raise UsageError for a word that it does not accept."""
    command, arguments = command_line(), list(arguments)
    while hasattr(command, "commands"):  # also of a group, as weights convert
        name = arguments.pop(0) if arguments else "nothing"
        if name not in command.commands:
            raise UsageError(f"no subcommand {name} of {command.name or 'verl_patches'}")
        command = command.commands[name]
    return command.make_context(command.name, arguments).params


def command_run(arguments):
    """Return the facts with which a run would start; files of an earlier run of the page need not exist."""
    values = parse(arguments)
    name, overrides = values.get("config_name"), values["overrides"] or []
    if name is None:
        values = {**values, "overrides": overrides}
        options = SmokeOptions(**{field.name: values[field.name] for field in fields(SmokeOptions)})
        name, overrides = options.config_name, smoke_overrides(options)
    return replace(composed(name, overrides), given_keys=frozenset())


def fault(words, whole=True):
    """Return the fault of a command, None without one; `whole`: it has no placeholders, so values are checked too."""
    if words[1] == "-c":
        return None
    if words[1] != "-m" or words[2] == "pytest":
        files = [word.partition("::")[0] for word in words[1:] if re.fullmatch(r"[\w./-]+/[\w-]+\.(py|sh)", word)]
        if gone := [name for name in files if not (ROOT / name).is_file()]:
            return f"no file {gone[0]}"
    arguments = command_arguments(words)
    if arguments is None and words[1] != "-m":
        text, given = (ROOT / words[1]).read_text(), [word.partition("=")[0] for word in words if word.startswith("--")]
        return next((f"{words[1]} has no {option}" for option in given if option not in text), None)
    if not arguments or arguments[0].startswith("-") or "--help" in arguments:
        return None
    try:
        values = parse(arguments)
    except typer.BadParameter as error:  # also for a missing one
        return error.format_message() if whole else None
    except UsageError as error:
        return error.format_message()
    keys = {word.lstrip("+").partition("=")[0] for word in values.get("overrides") or () if "=" in word}
    unknown = {key for key in keys if key.startswith("recipe.")} - {key for key, _ in recipe_keys()}
    return f"no key {unknown.pop()}" if unknown else None


def fault_of_start(words):
    """Return the value, row or check that keeps a run from starting, except missing files of an earlier run."""
    try:
        run = command_run(command_arguments(words))
        check_switches(run)
    except (ConfigError, UsageError) as error:
        return str(error)
    faults = [check for check in RULES.checks(run) if not check.ok and check.name not in FILES]
    return f"{faults[0].name}: {faults[0].detail}" if faults else None


@pytest.fixture(scope="module")
def copy(repository_copy):
    """Make a copy with the environment of this Python, and records of the runs that commands name."""
    (repository_copy / ".venv").symlink_to(sys.prefix)
    row = {"id": "a.b", "state": "active", "target": "m:f", "process": "controller"}
    step = {"step": 1, "seconds": {"step": 1.0}, "reward": 0.5, "tokens": None}
    for name in ("smoke", "before", "after", "deepseekv3_256die_random_init"):
        home = repository_copy / "outputs" / name
        folder = home / take_start([home], None, None)
        (folder / "summary.json").write_text(json.dumps({"run": name, "exit": "ok", "steps": [step], "patches": [row]}))
        (folder / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    (repository_copy / "outputs" / "gpu").mkdir()
    (repository_copy / "outputs" / "gpu" / "verl.log").write_text("step:1 - critic/score/mean:0.500\n")
    return repository_copy


def faults_in_shell(folder, commands):
    """Run commands in one fresh, activated shell; return those with an unexpected exit code, with their output."""
    lines = [ACTIVATE]
    for number, command in enumerate(commands):
        lines += [f"(\n{command}\n) > {number}.out 2>&1", f'echo "$?" > {number}.code']
    (folder / "commands").write_text("\n".join(lines))
    shell = ["bash", "--noprofile", "--norc", "commands"]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)}
    subprocess.run(shell, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    found = {}
    for number, command in enumerate(commands):
        expected, code = re.search(r"#.*\bexits (\d+)", command), (folder / f"{number}.code").read_text().strip()
        if code != (expected[1] if expected else "0"):
            found[command] = f"exit code {code}\n" + (folder / f"{number}.out").read_text()[-2000:]
    return found


def commands_in_class(name, pages):
    """Return each command of a class once, in the order of the pages."""
    return list(
        dict.fromkeys(c for page in pages for c in block_commands(page.read_text()) if command_class(c) == name)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_have_a_class_and_can_be_read(page, copy, monkeypatch):
    monkeypatch.chdir(copy)  # where the folders of --replay-rollout are
    text = page.read_text()
    found = {command: command_class(command) for command in block_commands(text)}
    assert [command for command, kind in found.items() if kind is None] == []
    faults = {c: wrong for c in inline_commands(text) if (wrong := fault(command_words(c), whole=False))}
    for command, kind in found.items():
        if re.match("(python|bash) ", plain(command)) and kind not in ("example", "of a job"):
            words = command_words(command)
            if wrong := fault(words) or (kind == "start" and page in ENGLISH and fault_of_start(words)):
                faults[command] = wrong
    assert faults == {}
    first = next((command for command in found if plain(command).startswith("python ")), None)
    assert first is None or ACTIVATE in text.partition(first)[0], f"no {ACTIVATE} above {first}"
    assert not re.search(r"\.venv/bin/(?!activate)", "".join(found))


def test_no_two_runs_of_the_readme_share_a_name():
    starts = [command_words(command) for command in commands_in_class("start", [ROOT / "README.md"])]
    new = [words for words in starts if "trainer.resume_mode=auto" not in words]
    names = [command_run(command_arguments(words)).recipe.run for words in new]
    assert len({*names}) == len(names) > 5, names


def test_commands_of_the_readme_work_in_a_fresh_shell(copy):
    wrong = "python -m verl_patches statuss   # the control"
    found = faults_in_shell(copy, [*commands_in_class("run", [ROOT / "README.md"]), wrong])
    assert found.keys() == {wrong} and "No such command 'statuss'" in found[wrong], found


@pytest.mark.nightly
def test_commands_of_the_docs_work_in_a_fresh_shell(copy):
    readme = commands_in_class("run", [ROOT / "README.md"])
    commands = [command for command in commands_in_class("run", ENGLISH) if command not in readme]
    assert len(commands) > 15 and faults_in_shell(copy, commands) == {}


@pytest.mark.slow
@pytest.mark.upstream
def test_commands_that_read_upstream_work_in_a_fresh_shell(copy, pytestconfig):
    (copy / "upstream").symlink_to(pytestconfig.getoption("--upstream").absolute())
    commands = commands_in_class("run with sources", ENGLISH)
    assert len(commands) > 2 and faults_in_shell(copy, commands) == {}


def calls_and_texts(source):
    """Return (the words of each call of our_command, texts that are commands of ours without such a call)."""
    tree, calls, texts = ast.parse(source), set(), []
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "our_command":
            calls.add(" ".join(word.value if isinstance(word, ast.Constant) else "*" for word in node.args))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            texts += re.findall(r"(?:python -m verl_patches |bash scripts/).*", node.value)
    return calls, texts


def test_errors_and_plans_print_commands_of_one_function_alone():
    found, texts = set(), {}
    for path in (ROOT / "verl_patches").rglob("*.py"):
        calls, written = calls_and_texts(path.read_text())
        found |= calls
        texts |= {path.name: written} if written else {}
    assert texts == {} and found == PRINTED.keys()
    for words in PRINTED:
        if "*" not in words and (wrong := fault(command_words(our_command(*words.split())), whole=False)):
            raise AssertionError(f"{words}: {wrong}")
    assert calls_and_texts('our_command("a", b, "c"); f"run python -m verl_patches check"')[1]  # the control


@pytest.mark.slow
def test_commands_that_errors_and_plans_print_work_in_a_fresh_shell(copy):
    commands = {"python -m verl_patches " + words for words in PRINTED.values() if words}
    wrong = "python -m verl_patches check --lines pypi"  # the control
    assert faults_in_shell(copy, [*commands, wrong]).keys() == {wrong}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("python -m verl_patches statuss", "statuss"),
        ("python -m verl_patches check --lines pypi", "--lines"),
        ("bash scripts/gone.sh", "scripts/gone.sh"),
        ("bash scripts/smoke.sh recipe.logprob_check.each=3", "recipe.logprob_check.each"),
    ],
)
def test_a_wrong_command_is_found(line, named):
    (block,) = block_commands(f"```bash\n{line}   # a comment\n```\n")
    (inline,) = inline_commands(f"Run `{line}` now.\n")
    assert named in fault(command_words(block)) and named in fault(command_words(inline), whole=False)
    assert fault(command_words("python -m verl_patches check --line pypi")) is None


def test_a_start_that_would_be_refused_is_found():
    smoke = "bash scripts/smoke.sh "
    for word, named in (("trainer.nodes=3", "trainer.nodes"), ("'recipe.patches=[-model.mla]'", "model.mla")):
        assert named in fault_of_start(command_words(smoke + word))
    assert fault_of_start(command_words(f"{smoke}--steps 5")) is None


def test_commands_are_read_whole_and_classified():
    plan = "A=1 python -m verl_patches plan x \\\n    y=1  # exits 1"
    rest = ["(cat) << 'END'\na\nEND", "export A='b\nc'"]
    found = block_commands("\n".join(("```bash", "# two", plan, *rest, "```\n")))
    assert found == [plan, *rest] and plain(plan) == "python -m verl_patches plan x y=1"
    assert [command_class(command) for command in found] == ["run", "foreign", "run"] and command_class(
        "curl x"
    ) is None
