"""Test that rows in the schemas of published data sets build and train by the commands of docs/data.md."""

import json
import shlex

import pyarrow as pa
import pytest
from loop_runs import ROOT
from pyarrow import parquet

from tests.scripts.test_commands import block_commands
from verl_patches.tools.data.build import build_data
from verl_patches.tools.data.settings import read_settings

pytestmark = pytest.mark.slow
ROWS = 24
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
BOXED = "{} Let's think step by step and output the final answer within \\boxed{{}}."


def _gsm8k(n):
    return {"question": f"Tom has {n} apples and buys 1,200 more. How many?", "answer": f"so\n#### {n + 1200:,}"}


def _verl_row(prompt, n, gold, source, **extra_info):
    messages = [{"content": prompt.format(f"What is {n}+1?"), "role": "user"}]
    reward = {"ground_truth": gold, "style": "rule"}
    return {"data_source": source, "prompt": messages, "reward_model": reward, "extra_info": extra_info}


ROW = {
    "gsm8k": _gsm8k,
    "dapo17k": lambda n: _verl_row(DAPO, n, f"{n + 1}", "math_dapo", index=f"9a9b6eb4-{n}"),
    "skywork": lambda n: _verl_row(
        BOXED, n, f'["{n + 1}"]', "train-math-deepscaler", index=n, model_difficulty={"m": 3}
    ),
}


def page_commands(name):
    """Return the words of the page's `data build` and of its smoke run for a data set."""
    page = (ROOT / "docs" / "data.md").read_text()
    commands = [
        shlex.split(text.replace("\\\n", " ")) for text in block_commands(page) if f"outputs/data/{name}" in text
    ]
    (made,) = [
        words[5:] for words in commands if words[3:5] == ["data", "build"] and f"input=mine/{name}" in " ".join(words)
    ]
    (run,) = [words[2:] for words in commands if words[1] == "scripts/smoke.sh"]
    return made, run


@pytest.mark.parametrize("name", ROW)
def test_published_rows_build_and_train(smoke, tmp_path_factory, name):
    folder, rows = tmp_path_factory.mktemp(name), [ROW[name](n) for n in range(ROWS)]
    made, run = page_commands(name)
    (file,) = [word.partition("/")[2] for word in made if word.startswith("input=")]
    if file.endswith(".jsonl"):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), folder / file)
    config, *overrides, _, output = [word.replace("mine/", f"{folder}/") for word in made]
    assert build_data(read_settings(ROOT / config, overrides, folder / "out"))[0] == 0
    place, words = run.index("--run"), [word.replace(output, str(folder / "out")) for word in run]
    done = smoke(*words[:place], *words[place + 2 :])
    assert done.summary["exit"] == "ok" and len(done.steps) == 2


@pytest.mark.nightly
def test_images_are_refused_with_exit_code_2_before_workers(smoke, tmp_path):
    """Rebuild the schema of geo3k."""
    rows = [{**_verl_row(BOXED, n, "1", "hiyouga/geometry3k"), "images": [{"bytes": b"PNG"}]} for n in range(4)]
    for row in rows:
        row["extra_info"] = {"index": 0}
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "geo3k.parquet")
    done = smoke(*(f"data.{name}_files={tmp_path}/geo3k.parquet" for name in ("train", "val")), ok=False)
    assert done.code == 2 and "geo3k.parquet, row 0: the file has a column images" in done.output
    assert "WorkerDict" not in done.log and done.steps == []
