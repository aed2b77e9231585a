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
from verl_patches.launch.doctor.node_checks import Node
from verl_patches.launch.launcher import TIMED_OUT, Outcome
from verl_patches.patching.report import NOT_RUN, Finding, Report
from verl_patches.patching.spec import PatchSpec
from verl_patches.plan.calibration import fitted_constants
from verl_patches.plan.plan import DRIVER_MODULE
from verl_patches.plan.step_plan import Workload, step_input
from verl_patches.platform import NO_DEVICE
from verl_patches.run.record.record import read_object, read_summary
from verl_patches.shared_files import write_whole
from verl_patches.spec import RunSpec
from verl_patches.step.log_probs.logprob_check import unchecked_reason
from verl_patches.values import size_text
from verl_patches.weights.run_folders import checkpoint_chain, list_starts

COMMAND, REPORT, PAGE, MEASURED = "bringup", "bringup.json", "bringup.md", "measured.json"
RUNGS = {  # rung: what it proves, and what it does not prove without a device
    "machine": ("versions, disks, memory, links and clocks of all nodes are as the run needs them", ""),
    "operators": ("operators of the device compute what plain PyTorch computes, within the tolerance", "kernels"),
    "groups": ("each group of ranks moves the values that it is given, not slower than its peers", "HCCL, and links"),
    "levels": (
        "one node trains, and vLLM's log-probs equal those of the trained model, at each level",
        "kernels, graphs of the device, what fits on a die, speed",
    ),
    "resume": ("a killed run goes on from its checkpoint", "a file system of several nodes, and that dies are freed"),
    "measured": ("figures for `plan --measured`", "seconds of a device"),
}
FINE_VERDICTS = {"ok", "not checked here"}
# names of worker/probe/groups.py, which imports torch
_OPERATORS, _MC2, _EXPERTS = "operators", "MC2", "rollout experts"
# {on a device: (times the seconds of its peers, seconds)} above both of which a group is slow; else ranks share cores
_SLOW_LIMITS = {True: (2.0, 1e-3), False: (20.0, 0.1)}
_PROBE_S = 3600
_SAVING = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1")


@dataclass
class Rung:
    """Hold the result of a rung: its Finding, seconds, and figures as JSON-ready data."""

    finding: Finding
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


class StartResult(NamedTuple):
    """Hold how a start ended, and its summary. Exit code 2 without a folder: it was refused."""

    outcome: Outcome
    summary: dict[str, Any]

    @property
    def todo(self) -> str:
        """Return where to look if it failed."""
        return f"the log is {self.outcome.folder / 'driver.log'}" if self.outcome.wall_s else ""


@dataclass
class Bringup:
    """Climb the rungs of one run, and write reports into its folder.

    words: the configuration and overrides of the command. option: of the upstream trees. compose: returns the run with
    more overrides. begin: starts a run to its end, and calls its second argument often. catalogue: the rows of a
    platform. levels: those of rung levels.
    """

    words: Sequence[str]
    option: Sequence[str]
    compose: Callable[[Sequence[str]], RunSpec]
    begin: Callable[[RunSpec, Callable[[], None]], Outcome]
    catalogue: Callable[[str], Iterable[PatchSpec]]
    say: Callable[[str], None]
    levels: Sequence[str | None] = ()

    def __post_init__(self) -> None:
        self.run = self.compose([])
        self.levels = self.levels or levels.run_levels(self.run)
        self.folder = self.run.home.with_name(f"{self.run.recipe.run}_bringup")
        self.probes: StartResult | None = None
        self.unanswered: list[str] = []  # probes that the workers did not live to answer
        self.rungs: dict[str, Rung] = {}

    def climb(self, first: str | None, last: str) -> Report:
        """Make the rungs from `first`, or from the one that failed in the last call, to `last`; return the report.

        Other rungs are those of earlier calls; where all have passed, none is made again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        passed, names = self._passed_rungs(), [*RUNGS][: [*RUNGS].index(last) + 1]
        open_rungs = [first] if first else [name for name in names if name not in passed]
        begin, failed = names.index(open_rungs[0]) if open_rungs else len(names), ""
        self.rungs = {name: _not_run(name, "left out by --from") for name in names[:begin]} | passed
        for name in names[begin:]:
            if failed:
                self.rungs[name] = _not_run(name, f"waits for rung {failed}")
                continue
            self.say(f"rung {name}: {RUNGS[name][0]}")
            began = time.monotonic()
            rung: Rung = getattr(self, f"_{name}")()  # each has a method of its name
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
        made_of = {"words": [*self.words], "levels": [*self.levels], "folder": str(self.folder)}
        return {**self.report().as_dict(), **made_of, "rungs": rungs}

    def _passed_rungs(self) -> dict[str, Rung]:
        """Return the rungs that an earlier call with the same words and levels has passed."""
        with suppress(ConfigError, KeyError, TypeError):
            found = read_object(self.folder / REPORT)
            if (found["words"], found["levels"]) == ([*self.words], [*self.levels]):
                rows = [Finding(**{**row, "details": tuple(row["details"])}) for row in found["rows"]]
                return {row.name: Rung(row, **found["rungs"][row.name]) for row in rows if row.state == "fine"}
        return {}

    def _write(self) -> None:
        write_whole(self.folder / REPORT, json.dumps(self.as_dict(), indent=1) + "\n")
        write_whole(self.folder / PAGE, "\n".join(page_lines(self.as_dict())) + "\n")

    def _rung(self, name: str, faults: Sequence[str], found: str, todo: str = "", **figures: Any) -> Rung:
        """Return the rung with its faults, or with what it has found; without a device it says what is not proved."""
        (proves, not_proved), details = RUNGS[name], [*faults[1:]]
        if self.run.platform in NO_DEVICE and not_proved:
            details.append(f"not proved here, without a device: {not_proved}")
        state, text = ("problem", faults[0]) if faults else ("fine", found)
        return Rung(Finding(name, state, "", proves, text, todo if faults else "", tuple(details)), figures=figures)

    def _start(
        self, name: str, words: Sequence[str], often: Callable[[], None] = lambda: None, **changes: Any
    ) -> StartResult:
        """Start the run with more overrides, under a name of its own; a refused start is a result too.

        Raise SystemExit where a signal has ended it: the rung is made again by the next call.
        """
        own = f"{self.run.recipe.run}_bringup_{name}"
        try:
            run = replace(self.compose([*words, f"recipe.run={own}"]), **changes)
            outcome = self.begin(run, often)
        except ConfigError as error:
            return StartResult(Outcome(2, f"it was refused: {error}", self.folder, 0.0), {"steps": []})
        if outcome.reason.startswith(INTERRUPTION_PREFIX):
            raise SystemExit(outcome.code)
        return StartResult(replace(outcome, reason=" ".join(outcome.reason.split())), read_summary(outcome.folder))

    # ---- rungs

    def _machine(self) -> Rung:
        saving = () if self.run.verl.trainer.nnodes > 1 else _SAVING  # as rung resume does
        node = Node(self.compose(saving))
        if node.nodes == 1 and self.run.recipe.ray_address is None:
            report = doctor.check_this_node(node)
        else:
            report = doctor.check_all_nodes(node, [*self.words, *saving, *self.option])
        faults, rates = [], []
        for each in report.findings:
            place = f" [{each.where}]" if each.where else ""
            if each.state == "problem":
                faults.append(f"{each.name}{place}: expected {each.expected}, found {each.found}; {each.todo}")
            elif each.name.startswith("disk: rate"):
                rates.append(f"{each.name}{place}: {each.found}")
        found = "; ".join([f"{len(report.findings)} checks", *rates])
        todo = "mend this, or go on in spite of it with --from operators"
        return self._rung("machine", faults, found, todo, doctor=report.as_dict())

    def _probe(self) -> StartResult:
        """Start the workers once for the rungs operators and groups."""
        if self.probes is None:
            from verl_patches.worker.probe.groups import group_probes  # imports torch

            words = ["recipe.watch.action=off", f"recipe.timeouts.wall_s={_PROBE_S}", "trainer.save_freq=-1"]
            words += ["trainer.resume_mode=disable", "trainer.val_before_train=false"]
            probes = {}
            for level in levels.run_levels(self.run):
                run = self.compose([f"level={level}"] if level else [])
                probes[f"{_OPERATORS} of level {level}" if level else _OPERATORS] = run.text()
            probes |= dict.fromkeys(group_probes(self.run), "")
            self.probes = self._start("probes", words, probes=probes)
            self.unanswered = [*probes][len(self.probes.summary.get("probes", {})) :]
        return self.probes

    def _operators(self) -> Rung:
        start = self._probe()
        rows = operator_rows(start.summary.get("probes", {}), _OPERATORS)
        faults = [operator_text(row) for row in rows if row["verdict"] not in FINE_VERDICTS]
        if not faults and self.unanswered and self.unanswered[0].startswith(_OPERATORS):
            faults = [f"the workers ended before or while they measured {self.unanswered[0]}: {start.outcome.reason}"]
        unchecked = sum(row["verdict"] == "not checked here" for row in rows)
        found = f"{len(rows)} operators agree with their references"
        found += f", {unchecked} of which are the references here: not checked" if unchecked else ""
        if not rows and not faults:
            found = f"line {self.run.line} on platform {self.run.platform} calls no operator of a device"
        return self._rung("operators", faults, found, start.todo, rows=rows)

    def _groups(self) -> Rung:
        start = self._probe()
        answers = start.summary.get("probes", {})
        rows = group_rows(answers, *_SLOW_LIMITS[self.run.platform not in NO_DEVICE])
        faults = [f"{row['group']} of ranks {row['ranks']}: {row['verdict']}" for row in rows if row["verdict"] != "ok"]
        exchanges = operator_rows(answers, _MC2)
        faults += [operator_text(row) for row in exchanges if row["verdict"] not in FINE_VERDICTS]
        if self.unanswered:
            faults.append(f"the workers ended while they measured {self.unanswered[0]}: {start.outcome.reason}")
        found = (
            f"{len(rows)} groups of {len({row['group'] for row in rows})} kinds" if rows else "one rank has no group"
        )
        peers = [row["seconds"] for row in rows if row["group"] == _EXPERTS]
        for row in exchanges if not faults else ():
            found += f"; MC2 takes {_cell(1e3 * row['seconds'])} ms, all-to-all one way {_cell(1e3 * max(peers))}"
        return self._rung("groups", faults, found, start.todo, rows=rows, mc2=exchanges)

    def _levels(self) -> Rung:
        if self.run.verl.trainer.nnodes > 1:
            return _not_run("levels", "for one node: " + our_command("bringup", "deepseekv3_16die"))
        figures: dict[str, Any] = {}
        before = None
        for level in self.levels:
            words, name = levels.level_words(self.run, level), level or "plain"
            self.say(f"level {name}: {levels.STEPS} steps")
            start = self._start(name, words)
            figures[name] = levels.step_figures(start.summary["steps"])
            if start.outcome.code:
                return self._failed_level(name, words, before, start, figures)
            before = self.compose(words)
            if figures[name]["logprob_delta"] is None:
                fault = f"level {name} compared no log-probs: {unchecked_reason(before)}"
                return self._rung("levels", [fault], "", "use a run that samples responses", levels=figures)
        deltas = ", ".join(f"{name} {_cell(found['logprob_delta'])}" for name, found in figures.items())
        weights = "the weights of the model's folder" if levels.has_weights(self.run) else "random weights"
        found = f"largest mean difference of log-probs, with {weights}: {deltas}"
        return self._rung("levels", (), found, levels=figures)

    def _failed_level(
        self, name: str, words: Sequence[str], before: RunSpec | None, start: StartResult, figures: dict[str, Any]
    ) -> Rung:
        """Return the rung with the smallest part of a level that failed, found by starts without parts of it.

        A start that was refused, was too late or lost a node fails by no part.
        """
        outcome = start.outcome
        fault = f"level {name} fails: {outcome.reason}"
        if outcome.code in (2, TIMED_OUT) or "LostNodeError" in outcome.reason:
            return self._rung("levels", [fault], "", start.todo, levels=figures)
        run = self.compose(words)
        suspects = levels.find_suspects(run, before, self.catalogue(run.platform))
        limit = f"at most {levels.MAX_STARTS} starts of about {max(outcome.wall_s, 1.0) / 60:.1f} minutes"
        self.say(f"{fault}\nsearching {len(suspects)} parts for the one at fault: {limit}")

        def passes_without(part: Sequence[levels.Suspect]) -> bool:
            off = levels.words_without(run, part)
            self.say(f"without {', '.join(each.name for each in part)}")
            return self._start(f"{name}_without", [*words, *off]).outcome.code == 0

        found = levels.find_part(suspects, passes_without, known=before is not None)
        off, parts = " ".join(levels.words_without(run, found.part)), [each.name for each in found.part]
        names = ", ".join(parts)
        if found.confirmed:
            text = f"it passes without {names}: {off}"
        elif found.part == suspects:
            without = f"it fails also without {names}" if suspects else "nothing that is on can be off"
            text = f"{without}: a row of role correctness, the device, or upstream's code is at fault"
        else:
            text = f"starts: {found.starts}; none shows one part to be at fault, the smallest not excluded: {names}"
        figures["at_fault"] = {"level": name, "parts": parts, "words": off, "confirmed": found.confirmed}
        figures["at_fault"]["starts"] = found.starts
        return self._rung("levels", [fault, text], "", f"give {off}" if found.confirmed else start.todo, levels=figures)

    def _resume(self) -> Rung:
        if self.run.verl.trainer.nnodes > 1:
            return _not_run("resume", "for one node, as rung levels")
        level = "reference" if "reference" in self.levels else self.levels[-1]
        words = [*levels.level_words(self.run, level), *_SAVING, "trainer.total_training_steps=3"]
        words.append("recipe.restart.max_restarts=0")
        home = self.run.home.with_name(f"{self.run.recipe.run}_bringup_resume")
        earlier, killed = {start.name for start in list_starts(home)}, list[int]()

        def kill_after_checkpoint() -> None:
            made = [start for start in list_starts(home) if start.name not in earlier]
            if not killed and made and checkpoint_chain(made[-1]).newest() is not None:
                killed.extend(kill_driver())

        first = self._start("resume", words, kill_after_checkpoint)  # level_words: from step 1
        if not killed:
            text = f"the run ended before it could be killed: {first.outcome.reason}"
            return self._rung("resume", [text], "", first.todo)
        self.say("the driver was killed; the same command goes on")
        second = self._start("resume", [*words, "trainer.resume_mode=auto"])
        resumed, saves = second.summary.get("resumed_step"), second.summary.get("checkpoints") or []
        faults = []
        if second.outcome.code:
            faults = [f"the second start fails: {second.outcome.reason}"]
        elif not resumed:
            faults = [f"the second start resumed from step {resumed}, expected the step of a checkpoint"]
        rate = max((save["bytes"] / save["complete_s"] / 1e9 for save in saves), default=None)
        size = max((save["bytes"] for save in saves), default=0)
        found = f"resumed from step {resumed}; a checkpoint of {size_text(size)}, saved at {_cell(rate)} GB/s"
        return self._rung("resume", faults, found, second.todo, resumed_step=resumed, saved_gb_s=rate, bytes=size)

    def _measured(self) -> Rung:
        found = {name: rung.figures for name, rung in self.rungs.items()}
        trained = found.get("levels", {}).get("levels", {})
        name = next((each for each in ("reference", *trained) if each in trained), None)
        seconds, constants = trained[name]["seconds"] if name else {}, {}
        if seconds and self.run.platform not in NO_DEVICE and self.run.hardware.timed:
            run = self.compose(levels.level_words(self.run, name))
            constants = fitted_constants(step_input(run, Workload()), seconds)
        data = {"words": [*self.words], "platform": self.run.platform, "seconds": seconds, "constants": constants}
        data |= {"disk_gb_s": found.get("resume", {}).get("saved_gb_s")}
        data |= {kind: found.get(kind, {}).get("rows", []) for kind in ("operators", "groups")}
        write_whole(self.folder / MEASURED, json.dumps(data, indent=1) + "\n")
        text = f"{len(seconds)} phases, {len(constants)} constants of the step model: {self.folder / MEASURED}"
        return self._rung("measured", (), text)


def _not_run(name: str, reason: str) -> Rung:
    return Rung(Finding(name, NOT_RUN, expected=RUNGS[name][0], found=reason))


def kill_driver() -> list[int]:
    """Kill the driver of the run that this process has started; return its pid."""
    drivers = [each for each in psutil.Process().children() if DRIVER_MODULE in each.cmdline()]
    for each in drivers:
        os.kill(each.pid, signal.SIGKILL)
    return [each.pid for each in drivers]


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
    return row["verdict"] not in FINE_VERDICTS, float("inf") if error is None else error


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
    """Return the lines of the report as one page of Markdown; REPORT has all figures."""
    lines = [f"# Bring-up: {' '.join(report['words'])}", "", "| rung | state | minutes | found |", "|---|---|---|---|"]
    for row in report["rows"]:
        minutes = f"{report['rungs'][row['name']]['seconds'] / 60:.1f}"
        lines.append(f"| {row['name']} | {row['state']} | {minutes} | {_cell(row['found'])} |")
    for row in report["rows"]:
        notes = [*row["details"], *([f"next: {row['todo']}"] if row["todo"] else [])]
        notes = [f"proves: {row['expected']}", *notes] if row["state"] == "fine" else notes
        lines += ["", f"## {row['name']}", "", *(f"- {_cell(note)}" for note in notes)]
    return lines


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else " ".join(str(value).split()).replace("|", "\\|")
