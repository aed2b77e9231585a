"""Test `data build`: equal bytes for any number of workers, rows left out with reasons, and never half an output."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.tools.data.cases import RECORDS, contents, make, read, write_lines
from verl_patches.__main__ import app
from verl_patches.errors import ConfigError
from verl_patches.processes import is_gone
from verl_patches.tools.data import build as module
from verl_patches.tools.data.output import new_folder
from verl_patches.tools.data.settings import read_settings

SAMPLE = ROOT / "data" / "deepscaler_sample.json"
MATHS = [RECORDS["maths"](n) for n in range(40)]


def questions(folder):
    return [[row["prompt"][-1]["content"] for row in read(folder, name)] for name in ("train", "test")]


def test_the_sample_is_what_it_was(tmp_path):
    """Check all problems, each once, with the instruction and their number in the file; the order is pinned."""
    code, report = build_preset("sample", tmp_path / "out", input=SAMPLE)
    assert (code, report["read"], report["train"], report["test"]) == (0, 312, 281, 31)
    rows = read(tmp_path / "out") + read(tmp_path / "out", "test")
    by_problem = {row["problem"]: row["answer"] for row in json.loads(SAMPLE.read_text())}
    problems = [row["problem"] for row in json.loads(SAMPLE.read_text())]
    for row in rows:
        problem, _, rest = row["prompt"][0]["content"].partition(" Let's think step by step")
        assert rest.endswith("\\boxed{}.") and row["data_source"] == "deepscaler"
        assert row["reward_model"] == {"style": "rule", "ground_truth": by_problem.pop(problem)}
        assert problem == problems[int(row["extra_info"]["origin"].removeprefix(f"{SAMPLE.name}:")) - 1]
    assert not by_problem
    order = list(range(312))
    random.Random(0).shuffle(order)
    assert [row["prompt"][0]["content"].partition(" Let's")[0] for row in rows[:3]] == [
        problems[n] for n in order[31:34]
    ]


def build_preset(name, out, **keys):
    given = [f"{key}={json.dumps(str(value))}" for key, value in keys.items()]
    return module.build_data(read_settings(ROOT / "data" / f"{name}.yaml", given, out))


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.integers(0, 30) | st.sampled_from([None, {"problem": 1}, {"problem": "\ud800", "answer": "1"}]), min_size=8
    ),
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 3]),
)
def test_bytes_do_not_depend_on_the_workers(tmp_path_factory, numbers, seed, workers):
    folder = tmp_path_factory.mktemp("workers")
    records = [RECORDS["maths"](n) if isinstance(n, int) else n for n in [*range(31, 35), *numbers]] * 20
    keys = {"seed": seed, "refuse_above": {"bad": 1}, "dataset_additional_keys": ["solution2"]}
    records = [{**record, "solution2": ["x", 1]} if record else record for record in records]
    made = []
    for number, count in enumerate((1, workers)):
        code, report = make(folder, records, out=f"out{number}", workers=count, log_interval=count, **keys)
        made.append((code, {**report, "files": 0}, contents(folder / f"out{number}")))
    assert made[0] == made[1] and made[0][0] == 0
    assert make(folder, records, out="other", **{**keys, "seed": seed ^ 1})[0] == 0
    if len({n for n in numbers if isinstance(n, int)}) > 6:  # the control: another seed is another order
        assert contents(folder / "other")["train.parquet"] != made[0][2]["train.parquet"]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(0, 12), min_size=4), st.floats(0.01, 0.99) | st.integers(1, 6), st.booleans(), st.booleans()
)
def test_each_problem_is_on_one_side_once(tmp_path_factory, numbers, test_size, dedupe, shuffle):
    folder, numbers = tmp_path_factory.mktemp("split"), [*range(13, 20), *numbers]
    keys = {"test_size": test_size, "dedupe": dedupe, "shuffle": shuffle}
    kept = list(dict.fromkeys(numbers)) if dedupe else numbers
    least = test_size if isinstance(test_size, int) else max(1, round(test_size * len(kept)))
    try:
        _, report = make(folder, [RECORDS["maths"](n) for n in numbers], **keys)
    except ConfigError as error:
        assert "none is left to train on" in str(error) and (least >= len(kept) or not dedupe)
        return
    assert least < len(kept)
    train, test = questions(folder / "out")
    expected = [RECORDS["maths"](n)["problem"] for n in kept]
    assert sorted(train + test) == sorted(expected) and len(test) == report["test"] >= least
    assert not dedupe or len(test) == least
    assert report["repeated"]["rows"] == len(numbers) - len(kept)
    assert not {*train} & {*test}
    assert shuffle or test[:least] == expected[:least]
    assert [row["extra_info"]["index"] for row in read(folder / "out")] == list(range(len(train)))


def test_a_repeated_problem_is_one_whatever_its_blanks_and_answers_of_one_prompt_are_two(tmp_path):
    spaced = {**MATHS[3], "problem": MATHS[3]["problem"].replace(" ", " \n"), "answer": "other"}
    _, report = make(tmp_path, [*MATHS, spaced])
    assert report["repeated"]["rows"] == 1
    assert report["repeated"]["shown"] == ["rows.jsonl:41: repeats an earlier row"]
    rows = [{"prompt": "Say it.", "response": f"{n}"} for n in range(5)] + [{"prompt": "Go.", "response": "0"}]
    assert make(tmp_path, [*rows, rows[0]], "instruction", out="sft")[1]["repeated"]["rows"] == 1


def test_rows_of_one_prompt_are_on_one_side(tmp_path):
    """Check that responses to a prompt of test.parquet are not in train; raw text has no prompts."""
    rows = [{"prompt": f"Say {n // 4}.", "response": f"{n}"} for n in range(400)]
    _, report = make(tmp_path, rows, "instruction", test_size=5)
    train, test = questions(tmp_path / "out")
    assert not {*train} & {*test} and len(train) + len(test) == 400
    assert report["test"] == len(test) == 4 * len({*test}) >= 5
    _, report = make(tmp_path, [RECORDS["text"](n) for n in range(40)], "text", test_size=5, out="text")
    assert report["test"] == 5
    with pytest.raises(ConfigError, match="test_size is 0.1: it takes 400 of 400 rows"):
        make(tmp_path, [{**row, "prompt": "p"} for row in rows], "instruction", out="one")


@pytest.mark.parametrize("handler", ["maths", "gsm8k"])
def test_sentences_as_gold_answers_are_kept_counted_shown_and_refused_above_a_tenth(tmp_path, handler):
    rows, sign = [RECORDS[handler](n) for n in range(40)], "#### " if handler == "gsm8k" else ""
    short = {"question": "Who?", "answer": rf"{sign}\text{{Ann}} and \frac{{1}}{{2}} + \sqrt{{xyz}} cm"}
    wordy = [{"question": f"{n}?", "answer": f"{sign}Because he sold {n} apples to Ann"} for n in range(5)]
    code, report = make(tmp_path, [*rows, short, *wordy[:4]], handler)
    found = [text.partition(": ")[0] for text in report["sentences"]["shown"]]
    assert (code, report["sentences"]["rows"], report["train"] + report["test"]) == (0, 4, 45)
    assert found == [f"rows.jsonl:{line}" for line in range(42, 46)]
    code, report = make(tmp_path, [*rows, *wordy], handler, out="b")
    assert (code, report["refused"]) == (1, ["sentences"])
    assert make(tmp_path, [*rows, *wordy], handler, out="b", refuse_above={"sentences": 0.2})[0] == 0


def test_bad_rows_are_counted_shown_and_refused_above_the_threshold(tmp_path):
    bad = [
        {"problem": "q"},
        *({"question": "", "answer": "1"} for _ in range(30)),
        *({"problem": "q", "answer": "9" * (600 + n)} for n in range(30)),
    ]
    code, report = make(tmp_path, [*MATHS, *bad])
    assert code == 1 and report["refused"] == ["bad"] and report["bad"]["rows"] == 61
    assert len(report["bad"]["shown"]) == module.MAX_SHOWN and not (tmp_path / "out").exists()
    hint = "name its column with map_keys={response: COLUMN}"
    text = f"rows.jsonl:41: expected response in column answer, found the columns problem; {hint}"
    assert report["bad"]["shown"][0] == text
    share = 61 / 101
    assert make(tmp_path, [*MATHS, *bad], refuse_above={"bad": share - 0.001})[0] == 1
    assert make(tmp_path, [*MATHS, *bad], refuse_above={"bad": share + 0.001})[0] == 0


@pytest.mark.slow
def test_an_example_is_rendered_by_the_tokenizer(tmp_path, tiny_model):
    pair, keys = {"prompt": "Say 1.", "chosen": "1!", "rejected": "no"}, {"tokenizer_name_or_path": str(tiny_model)}
    example = make(tmp_path, [pair, {**pair, "prompt": "Say 2."}], "preference", shuffle=False, **keys)[1]["example"]
    prompt = "<|begin|><|user|>Say 2.<|assistant|>"
    assert example == {"prompt": prompt, "chosen": "1!<|end|>", "rejected": "no<|end|>"}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", "reasoning_content": "b"}]
    code, report = make(tmp_path, [{"messages": talk}] * 3, "instruction", out="b", **keys)
    assert code == 1 and "leaves out or changes reasoning_content" in next(iter(report["bad"]["shown"]))


def test_the_manifest_has_the_hashes_of_inputs_and_files(tmp_path):
    make(tmp_path, MATHS, workers=1, seed=3)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for facts, folder in ((manifest["inputs"][0], tmp_path), *((one, tmp_path / "out") for one in manifest["files"])):
        content = (folder / facts["name"]).read_bytes()
        assert facts == {"name": facts["name"], "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["settings"]["seed"] == 3 and "workers" not in manifest["settings"]


# ---- the folder


def test_an_output_is_a_new_folder(tmp_path):
    make(tmp_path, MATHS)
    before = contents(tmp_path / "out")
    with pytest.raises(ConfigError, match="expected a new folder, found an existing one"):
        module.build_data(read_settings(tmp_path / "build.yaml"))
    assert contents(tmp_path / "out") == before
    with pytest.raises(ConfigError, match="output"), new_folder(Path("..")):
        pass


def test_an_error_or_a_second_writer_leaves_no_output(tmp_path, monkeypatch):
    target = tmp_path / "out"
    with pytest.raises(ZeroDivisionError), new_folder(target) as work:
        (work / "out" / "train.parquet").write_text("x")
        raise ZeroDivisionError
    with new_folder(target) as work:
        monkeypatch.setattr(Path, "exists", lambda _: False)  # the second writer looks before the first one writes
        with pytest.raises(ConfigError, match="existing one; remove it, or give another folder with -o"):
            with new_folder(target):
                pass
        assert (work / "out").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_leaves_nothing_under_the_final_name(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [RECORDS["maths"](n) for n in range(6000)])
    keys = {"input": str(source), "handler_name": "maths", "output_prefix": str(tmp_path / "out")}
    (tmp_path / "build.yaml").write_text(json.dumps(keys))
    command = [sys.executable, "-m", "verl_patches", "data", "build", str(tmp_path / "build.yaml"), "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / ".out.partial" / "rows").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "out").exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and ".out.partial: expected a new folder" in done.stderr


@pytest.mark.parametrize("how", ["end", "terminal", "worker", "kill"])
def test_a_build_of_several_workers_ends_with_all_its_processes(tmp_path, how):
    source = write_lines(tmp_path / "rows.jsonl", [RECORDS["maths"](n) for n in range(100_000)])
    keys = {"input": str(source), "handler_name": "maths", "output_prefix": str(tmp_path / "out"), "workers": 2}
    (tmp_path / "build.yaml").write_text(json.dumps(keys))
    command = [sys.executable, "-m", "verl_patches", "data", "build", str(tmp_path / "build.yaml")]
    process = psutil.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and len(workers := process.children()) < 3:  # and the library's queue
        time.sleep(0.005)
    while process.poll() is None and not [*(tmp_path / ".out.partial/rows").rglob("*cache-*")]:
        time.sleep(0.005)
    if how == "end":
        process.send_signal(signal.SIGTERM)
    elif how == "terminal":
        os.killpg(process.pid, signal.SIGINT)
    else:
        (workers[0] if how == "worker" else process).kill()
    text = process.communicate()[1]
    assert process.returncode == {"end": 143, "terminal": 130, "worker": 1, "kill": -signal.SIGKILL}[how], text
    assert "Traceback" not in text and (how != "worker" or "workers=2: one was killed; lower workers" in text)
    while not all(map(is_gone, workers)):
        time.sleep(0.05)


def test_nothing_is_written_but_the_output(tmp_path):
    """Check home and working folder; the input is a saved HF dataset, whose library has caches."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    datasets.Dataset.from_list(MATHS).save_to_disk(str(tmp_path / "saved"))
    before = contents(tmp_path / "saved")
    command = [sys.executable, "-m", "verl_patches", "data", "build", str(ROOT / "data" / "sample.yaml"), "workers=2"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT)}
    words = [f"input={tmp_path}/saved", "-o", str(tmp_path / "out")]
    done = subprocess.run([*command, *words], cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [*home.rglob("*"), *here.rglob("*")] == [] and contents(tmp_path / "saved") == before
    assert {path.name for path in tmp_path.iterdir()} == {"home", "here", "saved", "out"}


# ---- the command line


def run(*arguments):
    done = CliRunner().invoke(app, ["data", "build", *map(str, arguments)])
    return done.exit_code, done


def test_the_command_line(tmp_path):
    yaml = tmp_path / "build.yaml"
    write_lines(tmp_path / "rows.jsonl", MATHS)
    yaml.write_text(f"input: {tmp_path}/rows.jsonl\nhandler_name: maths\noutput_prefix: {tmp_path}/unused\n")
    code, done = run(yaml, "test_size=4", "-o", tmp_path / "out", "--json")
    report = json.loads(done.stdout)
    assert (code, report["exit"], report["train"], report["test"]) == (0, 0, 36, 4)
    assert not (tmp_path / "unused").exists()
    write_lines(tmp_path / "rows.jsonl", [*MATHS, {}])
    code, done = run(yaml, "-o", tmp_path / "bad")
    assert code == 1 and "nothing written: too many rows are bad" in done.stderr and "rows.jsonl:41" in done.stderr
    code, done = run(yaml, "-o", tmp_path / "bad", "refuse_above={bad: 0.5}")
    assert code == 0 and "36 train rows, 4 test rows" in done.stdout
    assert "bad: rows.jsonl:41: expected" in done.stderr
