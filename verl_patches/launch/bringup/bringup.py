"""Bring a machine up by proof: rungs from a node's software to a resumed run, each of which proves something.

    machine    doctor on every node; what a save and a resume take by the measured rate of the disk
    operators  the device's operators against plain PyTorch, at the run's shapes and all levels   } one start, without
    groups     each group of ranks: right values, and its rate against its peers; MC2             } models
    levels     one node trains the model at safe, reference and tuned; of a level that fails, the part that is at fault
    resume     a run is killed after a checkpoint, and goes on from it
    measured   what was measured, for `plan --measured`

A rung that failed ends the command; the next call begins with it. Reports are in the folder of the bring-up.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import psutil

from verl_patches.errors import INTERRUPTION_PREFIX, ConfigError, our_command
from verl_patches.launch.bringup import levels
from verl_patches.launch.doctor import doctor
from verl_patches.launch.doctor.node_checks import RATE_BYTES, Node, disk_rates
from verl_patches.launch.launcher import Outcome
from verl_patches.patching.report import NOT_RUN, Finding, Report
from verl_patches.patching.spec import PatchSpec
from verl_patches.plan.calibration import fitted_constants
from verl_patches.plan.plan import DRIVER_MODULE
from verl_patches.plan.step_plan import Workload, disk_figures, step_input
from verl_patches.platform import NO_DEVICE
from verl_patches.processes import FREE_S
from verl_patches.run.record.record import read_object, read_summary
from verl_patches.shared_files import disk_folder, write_whole
from verl_patches.spec import RunSpec
from verl_patches.values import size_text
from verl_patches.weights.run_folders import checkpoint_chain, list_starts

COMMAND, REPORT, PAGE, MEASURED = "bringup", "bringup.json", "bringup.md", "measured.json"
RUNGS = {  # rung: what it proves
    "machine": "versions, disks, memory, links and clocks of all nodes are as the run needs them",
    "operators": "operators of the device compute what plain PyTorch computes, within the tolerance",
    "groups": "each group of ranks moves the values that it is given, not slower than its peers",
    "levels": "one node trains, and vLLM's log-probs equal those of the trained model, at each level",
    "resume": "a killed run goes on from its checkpoint",
    "measured": "figures for `plan --measured`",
}
NOT_PROVED = {  # rung: what it does not prove without a device
    "operators": "the device's kernels",
    "groups": "HCCL, and links between dies",
    "levels": "kernels, graphs of the device, what fits on a die, speed",
    "resume": "a file system of several nodes, and that dies are freed",
    "measured": "seconds of a device",
}
_OPERATORS, _MC2 = "operators", "MC2"  # names of worker/probe/groups.py, which imports torch
# {on a device: (times the seconds of its peers, seconds)} above both of which a group is slow; else ranks share cores
_SLOW = {True: (2.0, 0.0), False: (20.0, 0.1)}
_PROBE_S = 3600


@dataclass
class Rung:
    """Hold the result of a rung: its Finding, seconds, and figures as JSON-ready data."""

    finding: Finding
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


class Start(NamedTuple):
    """Hold how a start ended: its outcome, and its summary."""

    outcome: Outcome
    summary: dict[str, Any]


@dataclass
class Bringup:
    """Climb the rungs of one run.

    words: the command's configuration and overrides, then `option`, of the upstream trees. compose: returns the run
    with more overrides. begin: starts a run to its end, and calls its second argument often. folder: of the reports.
    """

    words: Sequence[str]
    option: Sequence[str]
    compose: Callable[[Sequence[str]], RunSpec]
    begin: Callable[[RunSpec, Callable[[], None]], Outcome]
    catalogue: Callable[[str], Iterable[PatchSpec]]
    say: Callable[[str], None]
    chosen_levels: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.run = self.compose([])
        self.folder = self.run.home.with_name(f"{self.run.recipe.run}_bringup")
        self.probes: Start | None = None
        self.rungs: dict[str, Rung] = {}

    def climb(self, first: str | None, last: str) -> Report:
        """Make the rungs from `first`, or from the one that failed in the last call, to `last`; return the report.

        Other rungs are those of earlier calls; where all have passed, none is made again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        kept, names = self._kept_rungs(), [*RUNGS][: [*RUNGS].index(last) + 1]
        open_rungs = [first] if first else [name for name in names if name not in kept]
        begin, failed = names.index(open_rungs[0]) if open_rungs else len(names), ""
        self.rungs = {name: rung for name, rung in kept.items() if name not in names[begin:]}
        for name in names[begin:]:
            if failed:
                self.rungs[name] = Rung(Finding(name, NOT_RUN, expected=RUNGS[name], found=f"waits for rung {failed}"))
                continue
            self.say(f"rung {name}: {RUNGS[name]}")
            began = time.monotonic()
            rung = getattr(self, f"_{name}")()
            rung.seconds = round(time.monotonic() - began, 1)
            self.rungs[name] = rung
            failed = name if rung.finding.state == "problem" else ""
            self.say(f"rung {name}: {rung.finding.state}: {rung.finding.found}")
            self._write()
        self._write()
        return self.report()

    def report(self) -> Report:
        """Return the findings of the rungs, in their order."""
        return Report(COMMAND, self.run.line, tuple(self.rungs[name].finding for name in RUNGS if name in self.rungs))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, with {rung: {seconds, figures}} and what it was made of."""
        rungs = {name: {"seconds": rung.seconds, "figures": rung.figures} for name, rung in self.rungs.items()}
        return {**self.report().as_dict(), "words": [*self.words], "rungs": rungs, "folder": str(self.folder)}

    def _kept_rungs(self) -> dict[str, Rung]:
        """Return the rungs that an earlier call with the same words has passed."""
        with suppress(ConfigError, KeyError, TypeError):
            found = read_object(self.folder / REPORT)
            if found["words"] == [*self.words]:
                passed = [Finding(**{**row, "details": tuple(row["details"])}) for row in found["rows"]]
                return {row.name: Rung(row, **found["rungs"][row.name]) for row in passed if row.state == "fine"}
        return {}

    def _write(self) -> None:
        write_whole(self.folder / REPORT, json.dumps(self.as_dict(), indent=1) + "\n")
        write_whole(self.folder / PAGE, "\n".join(page_lines(self.as_dict())) + "\n")

    def _rung(self, name: str, faults: Sequence[str], found: str, todo: str = "", **figures: Any) -> Rung:
        """Return the rung with its faults, or with what it has found; without a device it says what is not proved."""
        details = [*faults[1:]]
        if self.run.platform in NO_DEVICE and name in NOT_PROVED:
            details.append(f"not proved here, without a device: {NOT_PROVED[name]}")
        state, text = ("problem", faults[0]) if faults else ("fine", found)
        finding = Finding(name, state, "", RUNGS[name], text, todo if faults else "", tuple(details))
        return Rung(finding, figures=figures)

    def _start(
        self, name: str, words: Sequence[str], often: Callable[[], None] = lambda: None, **changes: Any
    ) -> Start:
        """Start the run with more overrides, under a name of its own; a refused start is an outcome too.

        Raise SystemExit where a signal has ended it: the rung is made again by the next call.
        """
        own = f"{self.run.recipe.run}_bringup_{name}"
        try:
            run = replace(self.compose([*words, f"recipe.run={own}"]), **changes)
            outcome = self.begin(run, often)
        except ConfigError as error:
            return Start(Outcome(2, str(error), self.folder, 0.0), {"steps": []})
        if outcome.reason.startswith(INTERRUPTION_PREFIX):
            raise SystemExit(outcome.code)
        return Start(outcome, read_summary(outcome.folder))

    # ---- rungs

    def _machine(self) -> Rung:
        node = Node(self.run)
        if node.nodes == 1 and self.run.recipe.ray_address is None:
            report, _ = doctor.check_this_node(node)
        else:
            report, _ = doctor.check_all_nodes(node, [*self.words, *self.option])
        faults = []
        for each in report.findings:
            if each.state == "problem":
                place = f" [{each.where}]" if each.where else ""
                faults.append(f"{each.name}{place}: expected {each.expected}, found {each.found}; {each.todo}")
        written, read = disk_rates(disk_folder(self.run.home), RATE_BYTES[node.npu])
        saving = self.run.with_verl({"trainer.save_freq": 1})
        needs = {rate: disk_figures(saving, rate / 1e9)["parts"] for rate in (written, read)}
        seconds = {part["part"]: part["seconds"] for part in needs[written] if part["part"] == "save"}
        seconds |= {part["part"]: part["seconds"] for part in needs[read] if part["part"] == "load"}
        found = f"{len(report.findings)} checks; one process writes {written / 1e9:.2f} and reads {read / 1e9:.2f} GB/s"
        found += f", at which a save takes {seconds['save']:.0f} s and a load {seconds['load']:.0f} s"
        figures = {"written_gb_s": written / 1e9, "read_gb_s": read / 1e9, "seconds": seconds}
        return self._rung(
            "machine",
            faults,
            found,
            "mend this, or go on in spite of it with --from operators",
            **figures,
            doctor=report.as_dict(),
        )

    def _probe(self) -> Start:
        """Start the workers once for the rungs operators and groups."""
        if self.probes is None:
            from verl_patches.worker.probe.groups import group_probes  # imports torch

            words = ["recipe.watch.action=off", f"recipe.timeouts.wall_s={_PROBE_S}", "trainer.save_freq=-1"]
            words += ["trainer.resume_mode=disable", "trainer.val_before_train=false"]
            texts = {}
            for level in levels.run_levels(self.run):
                run = self.compose([f"level={level}"] if level else [])
                texts[f"{_OPERATORS}, level {level}" if level else _OPERATORS] = run.text()
            probes = texts | dict.fromkeys(group_probes(self.run), "")
            self.probes = self._start("probes", words, probes=probes)
        return self.probes

    def _operators(self) -> Rung:
        outcome, summary = self._probe()
        rows = operator_rows(summary.get("probes", {}), _OPERATORS)
        faults = [operator_text(row) for row in rows if row["verdict"] not in ("ok", "not checked here")]
        if outcome.code and not faults and not summary.get("probes"):
            faults = [f"the workers did not start: {outcome.reason}"]
        unchecked = sum(row["verdict"] == "not checked here" for row in rows)
        found = f"{len(rows)} operators agree with their references"
        found += f", {unchecked} of which are the references here: not checked" if unchecked else ""
        todo = f"the log is {outcome.folder / 'driver.log'}"
        if not rows and not faults:
            found = f"line {self.run.line} on platform {self.run.platform} calls no operator of a device"
        return self._rung("operators", faults, found, todo, rows=rows)

    def _groups(self) -> Rung:
        outcome, summary = self._probe()
        answers = summary.get("probes", {})
        rows = group_rows(answers, *_SLOW[self.run.platform not in NO_DEVICE])
        faults = [f"{row['group']} of ranks {row['ranks']}: {row['verdict']}" for row in rows if row["verdict"] != "ok"]
        exchanged = operator_rows(answers, _MC2)
        faults += [operator_text(row) for row in exchanged if row["verdict"] not in ("ok", "not checked here")]
        if outcome.code and not faults:
            faults = [f"{outcome.reason}; measured before: {', '.join(answers) or 'nothing'}"]
        found = (
            f"{len(rows)} groups of {len({row['group'] for row in rows})} kinds" if rows else "one rank has no group"
        )
        return self._rung(
            "groups", faults, found, f"the log is {outcome.folder / 'driver.log'}", rows=rows, mc2=exchanged
        )

    def _levels(self) -> Rung:
        if self.run.verl.trainer.nnodes > 1:
            text = f"for one node: {our_command(COMMAND, 'deepseekv3_16die')}"
            return Rung(Finding("levels", NOT_RUN, expected=RUNGS["levels"], found=text))
        known = [each for each in levels.run_levels(self.run) if not self.chosen_levels or each in self.chosen_levels]
        figures: dict[str, Any] = {}
        before = None
        for level in known:
            words, name = levels.level_words(self.run, level), level or "plain"
            self.say(f"level {name}: {levels.STEPS} steps")
            outcome, summary = self._start(name, words)
            figures[name] = levels.step_figures(summary["steps"])
            if outcome.code:
                return self._failed_level(name, words, before, outcome, figures)
            before = self.compose(words)
        deltas = ", ".join(f"{name} {_cell(found['logprob_delta'])}" for name, found in figures.items())
        weights = "the model's weights" if levels.has_weights(self.run) else "random weights"
        found = f"largest mean difference of log-probs, with {weights}: {deltas}"
        return self._rung("levels", (), found, levels=figures)

    def _failed_level(
        self, name: str, words: Sequence[str], before: RunSpec | None, outcome: Outcome, figures: dict[str, Any]
    ) -> Rung:
        """Return the rung with the smallest part of a level that failed, found by starts without parts of it."""
        minutes = max(outcome.wall_s, 1.0) / 60
        fault = f"level {name} fails: {' '.join(outcome.reason.split())}"
        try:
            run = self.compose(words)
        except ConfigError:
            return self._rung("levels", [fault], "", f"correct the configuration for level={name}", levels=figures)
        suspects = levels.find_suspects(run, before, self.catalogue(run.platform))
        limit = f"at most {levels.MAX_STARTS} starts of about {minutes:.1f} minutes"
        self.say(f"{fault}\nsearching {len(suspects)} parts for the one at fault: {limit}")

        def passes_without(part: Sequence[levels.Suspect]) -> bool:
            off = levels.words_without(run, part)
            self.say(f"without {', '.join(each.name for each in part)}")
            return self._start(f"{name}_without", [*words, *off]).outcome.code == 0

        found = levels.find_part(suspects, passes_without, known=before is not None)
        off, names = " ".join(levels.words_without(run, found.part)), ", ".join(each.name for each in found.part)
        if found.confirmed:
            part = f"it passes without {names}: {off}"
        elif found.part == suspects:
            without = f"it fails also without {names}" if suspects else "nothing that is on can be off"
            part = f"{without}: a row of role correctness, the device, or upstream's code is at fault"
        else:
            part = f"starts: {found.starts}; none shows one part to be at fault, the smallest not excluded: {names}"
        parts = [each.name for each in found.part]
        figures["at_fault"] = {
            "level": name,
            "parts": parts,
            "words": off,
            "confirmed": found.confirmed,
            "starts": found.starts,
        }
        todo = f"give {off}" if found.confirmed else f"the log is {outcome.folder / 'driver.log'}"
        return self._rung("levels", [fault, part], "", todo, levels=figures)

    def _resume(self) -> Rung:
        if self.run.verl.trainer.nnodes > 1:
            return Rung(Finding("resume", NOT_RUN, expected=RUNGS["resume"], found="for one node, as rung levels"))
        level = "reference" if self.run.as_npu else None
        words = [*levels.level_words(self.run, level), "trainer.save_freq=1", "recipe.restart.max_restarts=0"]
        words += ["trainer.total_training_steps=3", "trainer.resume_mode=auto", "trainer.max_actor_ckpt_to_keep=1"]
        home, killed = self.run.home.with_name(f"{self.run.recipe.run}_bringup_resume"), list[int]()

        def kill_after_checkpoint() -> None:
            starts = list_starts(home)
            if not killed and starts and checkpoint_chain(starts[-1]).newest() is not None:
                killed.extend(kill_driver())

        first, before = self._start("resume", words, kill_after_checkpoint), len(list_starts(home))
        if not killed:
            text = f"the run ended before it could be killed: {first.outcome.reason}"
            return self._rung("resume", [text], "", f"the log is {first.outcome.folder / 'driver.log'}")
        self.say("the driver was killed; the same command goes on")
        if self.run.recipe.ray_address is not None:  # whose raylets end the workers
            wait_for_workers(FREE_S)
        second = self._start("resume", words)
        resumed, saves = second.summary.get("resumed_step"), second.summary.get("checkpoints") or []
        faults = []
        if second.outcome.code:
            faults = [f"the second start fails: {second.outcome.reason}"]
        elif not resumed or len(list_starts(home)) != before + 1:
            faults = [f"the second start resumed from step {resumed}, expected the step of a checkpoint"]
        rate = max((save["bytes"] / save["complete_s"] / 1e9 for save in saves), default=None)
        size = max((save["bytes"] for save in saves), default=0)
        found = f"resumed from step {resumed}; a checkpoint of {size_text(size)}, saved at {rate or 0:.2f} GB/s"
        todo = f"the log is {second.outcome.folder / 'driver.log'}"
        return self._rung("resume", faults, found, todo, resumed_step=resumed, saved_gb_s=rate, bytes=size)

    def _measured(self) -> Rung:
        found = {name: rung.figures for name, rung in self.rungs.items()}
        steps = found.get("levels", {}).get("levels", {})
        name = next((each for each in ("reference", "plain", *steps) if each in steps), None)
        seconds = steps[name]["seconds"] if name else {}
        constants = {}
        if seconds and self.run.as_npu and self.run.hardware.timed:
            level = "reference" if name == "reference" else name
            constants = fitted_constants(
                step_input(self.compose(levels.level_words(self.run, level)), Workload()), seconds
            )
        data = {"words": [*self.words], "platform": self.run.platform, "seconds": seconds, "constants": constants}
        data["disk_gb_s"] = found.get("resume", {}).get("saved_gb_s")
        for kind in ("operators", "groups"):
            data[kind] = found.get(kind, {}).get("rows", [])
        write_whole(self.folder / MEASURED, json.dumps(data, indent=1) + "\n")
        text = f"{len(seconds)} phases, {len(constants)} constants of the step model: {self.folder / MEASURED}"
        return self._rung("measured", (), text)


def kill_driver() -> list[int]:
    """Kill the driver of the run that this process has started; return its pid."""
    drivers = [each for each in psutil.Process().children() if DRIVER_MODULE in each.cmdline()]
    for each in drivers:
        os.kill(each.pid, signal.SIGKILL)
    return [each.pid for each in drivers]


def wait_for_workers(limit_s: float) -> None:
    """Wait until no worker of verl is left on this host, as each holds a die and pinned memory until it has ended."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends and any(
        "WorkerDict" in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])
    ):
        time.sleep(1)


def operator_rows(answers: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the rows of all ranks and levels that begin with `kind`: of each operator and shape the worst one."""
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for what, ranks in answers.items():
        for rank, answer in enumerate(ranks):
            for row in answer.get("rows", ()) if what.startswith(kind) else ():
                key, found = (row["operator"], row["shape"]), {**row, "rank": rank}
                if key not in worst or _badness(found) > _badness(worst[key]):
                    worst[key] = found
    return [*worst.values()]


def _badness(row: dict[str, Any]) -> tuple[bool, float]:
    error = row["error"]
    return row["verdict"] not in ("ok", "not checked here"), float("inf") if error is None else error


def operator_text(row: dict[str, Any]) -> str:
    """Return what is wrong with an operator as a sentence."""
    error = "" if row["error"] is None else f", error {row['error']:.2g}, tolerance {row['tolerance']:g}"
    return f"{row['operator']} on rank {row['rank']}: {row['verdict']}{error} ({row['shape']})"


def group_rows(answers: dict[str, Any], slow: float, least_s: float) -> list[dict[str, Any]]:
    """Return {group, ranks, seconds, gb_s, verdict} of each group: its slowest rank, against the median of its kind.

    A group is slow above `slow` times that median and least_s seconds. gb_s: bytes of a rank's tensor over seconds.
    """
    rows = []
    for what, ranks in answers.items():
        groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        for rank, answer in enumerate(ranks):
            if "ranks" in answer:
                groups.setdefault(tuple(answer["ranks"]), []).append({**answer, "rank": rank})
        seconds = {group: max(answer["seconds"] for answer in found) for group, found in groups.items()}
        for group, found in groups.items():
            wrong = [f"wrong on rank {answer['rank']}: {answer['wrong']}" for answer in found if answer["wrong"]]
            peers = statistics.median_low(seconds.values())
            late = seconds[group] > max(slow * peers, least_s)
            verdict = f"slow: {seconds[group]:.3g} s, its peers take {peers:.3g}" if late else "ok"
            figures = {"seconds": seconds[group], "gb_s": found[0]["bytes"] / 1e9 / seconds[group]}
            rows.append({"group": what, "ranks": [*group], **figures, "verdict": (wrong or [verdict])[0]})
    return rows


def page_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines of the report as one page of Markdown."""
    lines = [f"# Bring-up: {' '.join(report['words'])}", "", "| rung | state | minutes | found |", "|---|---|---|---|"]
    for row in report["rows"]:
        minutes = f"{report['rungs'][row['name']]['seconds'] / 60:.1f}"
        lines.append(f"| {row['name']} | {row['state']} | {minutes} | {_cell(row['found'])} |")
    for level, found in report["rungs"].get("levels", {"figures": {}})["figures"].get("levels", {}).items():
        if "seconds" in found:
            phases = ", ".join(f"{phase} {_cell(s)}" for phase, s in found["seconds"].items())
            lines.append(f"| level {level} | mean dlogp {_cell(found['logprob_delta'])} | | seconds: {phases} |")
    for row in report["rows"]:
        notes = [*row["details"], *([f"next: {row['todo']}"] if row["todo"] else [])]
        lines += ["", f"## {row['name']}", "", f"Proves: {row['expected']}.", *(f"- {note}" for note in notes)]
        figures = report["rungs"][row["name"]]["figures"]
        for table in ("rows", "mc2"):
            if cells := figures.get(table):
                columns = [name for name in cells[0] if name != "shape"]
                lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
                lines += [f"| {' | '.join(_cell(cell[name]) for name in columns)} |" for cell in cells]
    return lines


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")
