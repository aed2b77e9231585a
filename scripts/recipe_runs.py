"""Run the presets of configs/algo and the chains of scripts/chains.py, and write docs/recipes.json and its tables.

scripts/recipes.sh says how to call it. The record is {runs: [{algo, where, command, date, exit, step, figures, learnt,
reason}], chains: [{chain, command, date, seconds, exit, figures, reason}]}. exit: the command's exit code; 2 for a
refusal, 1 also for a learning run or a chain that does not reach its stated amount; step, figures: the last step and
its {name: value}; learnt, of a learning run: [name, mean of the first steps, of the last]; reason: why exit is not 0;
figures of a chain: a [quantity, start, value there, end, value there] each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chains import CHAINS, shortfalls

from verl_patches.weights.run_folders import LATEST_LINK

ROOT = Path(__file__).resolve().parent.parent
RECORD, PICTURES = ROOT / "docs" / "recipes.json", ROOT / "docs" / "images"
PROGRAM = ("-m", "verl_patches")
STEPS, MAX_REASON_CHARS = 3, 160
PLACES = {"pypi": "pypi", "a3": "a3 on CPU", "emulated": "a3, emulated NPU", "learning": "learning run"}
OPTIONS = {"a3": ("--line", "a3"), "emulated": ("--line", "a3", "--emulate-npu")}
# learning runs of presets on the tiny model: the least improvement from the first steps to the last (about half of the
# improvement that was seen), and the options of the smoke. A preset that is not here has no learning run.
_MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
LEARNING = {
    "grpo": (0.35, ("--learn", "algo=grpo")),
    "ppo": (0.09, ("--learn", "algo=ppo")),
    "sft": (1.3, ("--learn", "algo=sft", f"{_MICRO}=6")),
    "dpo": (
        0.28,
        (
            "--learn",
            "algo=dpo",
            f"{_MICRO}=12",
            *(f"actor_rollout_ref.{name}.log_prob_micro_batch_size_per_gpu=12" for name in ("ref", "rollout")),
        ),
    ),
}
# metrics of a step (metrics.jsonl) that a cell shows where the run has them. Runs on fixed data have no rewards, and
# there verl's loss has the objective's gradient, but not its value
FIGURES = {
    "critic/score/mean": "reward",
    "actor/pg_loss": "loss",
    "objective/loss": "objective's loss",
    "objective/accuracy": "accuracy",
    "actor/grad_norm": "grad norm",
    "critic/vf_loss": "value loss",
    "critic/grad_norm": "value grad norm",
    "recipe/logprob_delta_mean": "dlogp",
}
ROLLOUT_FIGURES = ("reward", "loss", "value loss")
# a learning run shows the first of these that it has
LEARNING_METRICS = ("objective/accuracy", "objective/loss", "critic/score/mean")
MEAN_STEPS = 5  # number of first, and of last, steps that are averaged


def presets() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.stem for path in (ROOT / "configs" / "algo").glob("*.yaml"))


def preset_comment(name: str) -> str:
    """Return the comment at the head of a preset, as one line."""
    lines = (ROOT / "configs" / "algo" / f"{name}.yaml").read_text().splitlines()[1:]
    head = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.lstrip("# ") for line in head)


def first_sentence(text: str) -> str:
    """Return the first sentence of a description, on one line."""
    return re.split(r"(?<!\beq)(?<!\bDr)\.\s", " ".join(text.split()) + " ")[0].rstrip(". ") + "."


def smoke_arguments(algo: str, where: str, upstream: str | None) -> list[str]:
    """Return the words after `bash scripts/smoke.sh`, with the folder of the upstream sources as given."""
    if where == "learning":
        return list(LEARNING[algo][1])
    sources = ["--upstream", upstream] if upstream and where != "pypi" else []
    return [*OPTIONS.get(where, ()), *sources, "--steps", str(STEPS), f"algo={algo}"]


def run_preset(algo: str, where: str, upstream: str | None) -> dict[str, Any]:
    """Make one run and return its record."""
    name = f"recipe_{algo}_{where}"
    words = ["smoke", "--run", name, *smoke_arguments(algo, where, upstream), f"recipe.output_root={ROOT / 'outputs'}"]
    done = subprocess.run([sys.executable, *PROGRAM, *words], cwd=ROOT, capture_output=True, text=True)
    command = " ".join(["bash scripts/smoke.sh", *smoke_arguments(algo, where, upstream and "upstream")])
    head = {"algo": algo, "where": where, "command": command, "date": datetime.date.today().isoformat()}
    made = head | run_outcome(done.returncode, done.stderr, ROOT / "outputs" / name / LATEST_LINK)
    if where != "learning":
        made.pop("learnt", None)  # too few steps: the first ones are also the last ones
    elif not made["exit"]:
        PICTURES.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "outputs" / name / LATEST_LINK / "training.png", PICTURES / f"learning_{algo}.png")
        if reason := shortfall(algo, made["learnt"]):
            made |= {"exit": 1, "reason": reason}
    return made


def shortfall(algo: str, learnt: Sequence[Any]) -> str:
    """Return how a learning run's `learnt` falls short of LEARNING; empty if it does not."""
    (what, first, last), stated = learnt, LEARNING[algo][0]
    improved = first - last if what == FIGURES["objective/loss"] else last - first
    return "" if improved >= stated else f"{what} improved by {_number(improved)}, expected {_number(stated)} or more"


def run_outcome(code: int, stderr: str, folder: Path) -> dict[str, Any]:
    """Return {exit, step, figures, reason} of a run that ended, from its folder and its standard error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("verl_patches: ")), lines[-1] if lines else "")
    found: dict[str, Any] = {"exit": code, "step": None, "figures": {}, "reason": ""}
    if code:
        return found | {"reason": said.removeprefix("verl_patches: ")}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["step"]]  # step 0 is a validation
    last, fixed = steps[-1], "objective/loss" in steps[-1]
    figures = {label: last[name] for name, label in FIGURES.items() if name in last}
    if fixed:
        figures = {label: value for label, value in figures.items() if label not in ROLLOUT_FIGURES}
    learnt = next(name for name in LEARNING_METRICS if name in last)
    ends = [statistics.fmean(step[learnt] for step in part) for part in (steps[:MEAN_STEPS], steps[-MEAN_STEPS:])]
    return found | {"step": last["step"], "figures": figures, "learnt": [FIGURES[learnt], *ends]}


def merged_record(record: Mapping[str, Any], made: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the record with these runs in place of those of the same preset and place; presets not in `names` go."""
    runs = {(run["algo"], run["where"]): dict(run) for run in (*record["runs"], *made) if run["algo"] in names}
    ordered = sorted(runs, key=lambda key: (key[0], list(PLACES).index(key[1])))
    return {**record, "runs": [runs[key] for key in ordered]}


def run_chain(name: str) -> dict[str, Any]:
    """Run the commands of a chain up to the first that fails, and return the chain's record."""
    folder, start = ROOT / "outputs" / f"chain_{name}", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    made: dict[str, Any] = {"chain": name, "command": f"bash scripts/recipes.sh --where chains --only {name}"}
    made |= {"date": datetime.date.today().isoformat(), "exit": 0, "figures": [], "reason": ""}
    for words in CHAINS[name].commands(folder):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            made |= {"exit": 1, "reason": " ".join([*words, *last]).replace(f"{ROOT}/", "")}
            break
    else:
        made["figures"] = [list(figure) for figure in CHAINS[name].figures(folder)]
        if reason := shortfalls(name, made["figures"]):
            made |= {"exit": 1, "reason": reason}
    return made | {"seconds": round(time.monotonic() - start)}


def chains_table(record: Mapping[str, Any]) -> str:
    """Return a table of each chain's figures; a chain that failed has the reason instead."""
    text = ["| chain | figure | from | to | changes by at least | how |", "|---" * 6 + "|"]
    for run in record.get("chains", ()):
        name, how = f"`{run['chain']}`", f"{run['seconds']} s ({run['date']})"
        if run["exit"]:
            text.append(f"| {name} | - | - | - | - | {_cell(run)} |")
            continue
        for (what, start, first, end, last), least in zip(run["figures"], CHAINS[run["chain"]].least, strict=True):
            ends = f"{_number(first)} ({start}) | {_number(last)} ({end})"
            text.append(f"| {name} | {what} | {ends} | {least:+g} | {how} |")
            name = how = ""
    return "\n".join(text) + "\n"


def read_record() -> dict[str, Any]:
    """Return the record; an empty one if there is no file yet."""
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {"runs": []}


def presets_table(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the presets with what each is and where it ran, and the tables of the learning runs and of the chains."""
    runs = {(run["algo"], run["where"]): run for run in record["runs"]}
    places = [place for place in PLACES if place != "learning"]
    text = [f"- `{name}`: {first_sentence(preset_comment(name))}" for name in names]
    found = {(name, place): runs.get((name, place)) for name in names for place in places}
    dates = sorted({run["date"] for run in found.values() if run and not run["exit"]})
    where = "; ".join(PLACES[place] for place in places)
    failed = {key: run for key, run in found.items() if run is None or run["exit"]}
    when = " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))
    text += ["", f"Each ran {STEPS} steps ({where}; {when}){', except:' if failed else '.'}"]
    text += [f"- `{name}`, {PLACES[place]}: {_cell(run)}" for (name, place), run in failed.items()]
    steps = f"first {MEAN_STEPS} steps | last {MEAN_STEPS}"
    text += ["", f"| learning run | mean of | {steps} | improves by at least | date |"]
    text.append("|---" * 6 + "|")
    for name in names:
        if name in LEARNING and (run := runs.get((name, "learning"))) is not None:
            what, *ends = run.get("learnt") or ["-", None, None]
            numbers = " | ".join(map(_number, (*ends, LEARNING[name][0])))
            how = _cell(run) if run["exit"] else f"[{run['date']}](images/learning_{name}.png)"
            text.append(f"| `{name}` | {what} | {numbers} | {how} |")
    text += ["", chains_table(record).rstrip()]
    return "\n".join(text) + "\n"


def _cell(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return "not run"
    if run["exit"]:
        how = "refused" if run["exit"] == 2 else "failed"
        reason = run["reason"] if len(run["reason"]) <= MAX_REASON_CHARS else f"{run['reason'][:MAX_REASON_CHARS]}..."
        return f"{how}: {reason.replace('|', '&#124;')} ({run['date']})"
    figures = [f"{name} {_number(value)}" for name, value in run["figures"].items()]
    return f"{', '.join(figures)} ({run['date']})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the requested runs, and return 1 if one of them failed without being refused."""
    names = presets()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upstream", metavar="DIR", help="folder that scripts/fetch_upstream.sh made: run line a3 too")
    parser.add_argument("--only", action="append", choices=[*names, *CHAINS], help="a preset or chain to run")
    parser.add_argument("--where", action="append", choices=[*PLACES, "chains"], help="a kind of run")
    given = parser.parse_args(arguments)
    if given.upstream is None and {"a3", "emulated"} & {*(given.where or ())}:
        parser.error("--where a3 and emulated need --upstream DIR; make it with scripts/fetch_upstream.sh --dest DIR")
    places = given.where or [*(place for place in PLACES if given.upstream or place not in OPTIONS), "chains"]
    failed = False
    for name in given.only or [*names, *CHAINS]:
        if name in CHAINS and "chains" in places:
            made, record = run_chain(name), read_record()
            others = [run for run in record.get("chains", ()) if run["chain"] in CHAINS and run["chain"] != name]
            chains = sorted([*others, made], key=lambda run: list(CHAINS).index(run["chain"]))
            RECORD.write_text(json.dumps(record | {"chains": chains}, indent=1) + "\n")
            print(f"{name}: {made['reason'] or made['figures']}", flush=True)
            failed = failed or made["exit"] != 0
        for place in places if name in names else ():
            if place == "chains":
                continue
            if place == "learning" and name not in LEARNING:
                continue
            made = run_preset(name, place, given.upstream and str(Path(given.upstream).absolute()))
            RECORD.write_text(json.dumps(merged_record(read_record(), [made], names), indent=1) + "\n")
            print(f"{name}, {PLACES[place]}: {_cell(made)}", flush=True)
            failed = failed or made["exit"] not in (0, 2)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
