"""Mutation test of the planners, the memory schedule, the tensor cache, rewards and the patch engine; run by hand.

    .venv/bin/python tests/mutants.py [--only NAME ...] [--json]

Copies the repository to a temporary folder, first runs all named tests there unchanged (the control), then applies one
mutant of MUTANTS after another and runs that mutant's tests. The working tree is never written to.

killed: a test fails, or the run ends after TIMEOUT_S; survived: all pass; stale: the old text is not exactly once in
the file. Exit code 0: at least 90 % killed and none stale; 1: otherwise; 2: wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
LEAST_KILLED = 0.9
TIMEOUT_S, CONTROL_TIMEOUT_S = 300, 1800
NOT_THE_COPY = 90
# an editable install of the working tree comes after PYTHONPATH; the tests' process proves that it did
CHILD = f"""
import sys, pytest, verl_patches
if not verl_patches.__file__.startswith(sys.argv[1]):
    sys.exit({NOT_THE_COPY})
sys.exit(pytest.main(sys.argv[2:]))
"""


class Mutant(NamedTuple):
    """`old`, exactly once in verl_patches/`file`, becomes `new`; `tests` (below tests/) must then fail.

    `slow`: tests marked slow run too.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    slow: bool = False


class StaleMutantError(ValueError):
    """The old text of a mutant is not exactly once in its file."""


PLAN, BLOCKS = ("reshard/test_plan.py",), ("reshard/test_plan_controls.py", "reshard/test_plan.py")
LAYOUT, SHARDING = ("layout/test_parallel.py",), ("layout/test_sharding.py",)
PHASES, LEDGER, CONDUCT = ("memory/test_phases.py",), ("memory/test_ledger.py",), ("memory/test_conduct.py",)
BATCH, MICRO, CACHE = ("comm/test_batch_plan.py",), ("comm/test_micro_batches.py",), ("comm/test_tensor_cache.py",)
MATHS = ("rewards/test_maths.py",)
ENGINE, POLICY, ORDERS = ("patching/test_engine.py",), ("patching/test_policy.py",), ("patching/test_orders.py",)
ORDER_KEY = "(len(blocks[i].holders), -router.sizes[i], i)"

MUTANTS = (
    # reshard
    Mutant("route-small-blocks-first", "reshard/route.py",
           ORDER_KEY, "(len(blocks[i].holders), router.sizes[i], i)", PLAN),
    Mutant("route-many-holders-first", "reshard/route.py",
           ORDER_KEY, "(-len(blocks[i].holders), -router.sizes[i], i)", PLAN),
    Mutant("route-may-always-send", "reshard/route.py",
           "return load + size <= mean or load <= min(self.load[rank] for rank in holders) + AHEAD * mean",
           "return True", PLAN),
    Mutant("route-first-holder-sends", "reshard/route.py",
           "heapq.heapreplace(waiting, (self.load[sender], sender))", "pass", PLAN),
    Mutant("schedule-crumbs", "reshard/schedule.py",
           "self.least = -(-bucket_bytes // CUT)", "self.least = 1", PLAN),
    Mutant("schedule-idle-senders-first", "reshard/schedule.py",
           "key=lambda r: (-self.to_send[r], r)", "key=lambda r: (self.to_send[r], r)", PLAN),
    Mutant("schedule-idle-receivers-first", "reshard/schedule.py",
           "key=lambda r: (-self.to_receive[r], r)", "key=lambda r: (self.to_receive[r], r)", PLAN),
    Mutant("blocks-holders-of-a-part", "reshard/blocks.py",
           "if a <= start and stop <= b)", "if a <= start)", BLOCKS),
    Mutant("plan-digest-of-inputs-only", "reshard/plan.py",
           'said.update(array("q", [number for piece in self.pieces for number in piece]).tobytes())', "pass", PLAN),
    Mutant("plan-whole-tensors-not-kept", "reshard/plan.py",
           "set(block.holders).intersection(block.receivers)", "set(block.holders).intersection(block.owners)", PLAN),
    Mutant("sizes-not-aligned", "reshard/sizes.py",
           "return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES", "return size_bytes", PLAN),
    Mutant("check-start-of-what-is-held", "reshard/check.py",
           "if not start <= region.start < region.stop <= stop:",
           "if not region.start < region.stop <= stop:", BLOCKS),
    Mutant("check-segment-order", "reshard/check.py",
           "if sent != awaited or not sent:", "if sorted(sent) != sorted(awaited) or not sent:", BLOCKS),
    Mutant("coverage-touching-is-twice", "reshard/coverage.py",
           "self.starts[1:] < reach[:-1]", "self.starts[1:] <= reach[:-1]", ("reshard/test_coverage.py",)),
    Mutant("checksum-of-any-place", "reshard/checksum.py",
           "place = row[:, None] * shape[1] + column", "place = row[:, None] + column", ("reshard/test_verify.py",)),
    # layout
    Mutant("sharding-padding-not-capped", "layout/sharding.py",
           "padding = min(size, max(0, start + size - full))", "padding = max(0, start + size - full)", SHARDING),
    Mutant("sharding-experts-by-tp", "layout/sharding.py",
           "index = at.tp if parameter.expert is None else at.etp", "index = at.tp", SHARDING),
    Mutant("sharding-vocabulary-not-padded", "layout/sharding.py",
           "padded = -(-full // rule.vocabulary_multiple) * rule.vocabulary_multiple", "padded = full", SHARDING),
    Mutant("layout-stages-of-neighbour-chunks", "layout/parallel.py",
           "[stage :: self.pp]", "[stage * self.vpp : (stage + 1) * self.vpp]", LAYOUT),
    Mutant("layout-rest-of-experts-dropped", "layout/parallel.py",
           "num_experts if last else (index + 1) * local", "(index + 1) * local", LAYOUT),
    Mutant("layout-instance-dp-is-dp", "layout/parallel.py",
           "by_instance.setdefault(self.coordinates(rank).edp, [])", "by_instance.setdefault(0, [])", LAYOUT),
    Mutant("static-bytes-without-cp", "layout/static_bytes.py",
           "(layout.dp * layout.cp)", "layout.dp", ("layout/test_static_bytes.py",)),
    # memory
    Mutant("phases-every-move-counts", "memory/phases.py",
           "does = comes != (move.tenant in now)", "does = True", PHASES),
    Mutant("phases-peak-of-a-later-step-only", "memory/phases.py",
           "highest = max(moment, before, key=lambda each: each.peak_bytes)", "highest = moment", PHASES),
    Mutant("ledger-growth-past-full", "memory/ledger.py",
           "(there and entry.grows and held < wanted)", "(there and entry.grows)", LEDGER),
    Mutant("ledger-freed-is-all", "memory/ledger.py",
           "entry.told_bytes = 0 if size_bytes is None else entry.told_bytes - size_bytes",
           "entry.told_bytes = 0", LEDGER),
    Mutant("ledger-peak-is-the-last", "memory/ledger.py",
           'record["peak_bytes"] = max(record["peak_bytes"], total)', 'record["peak_bytes"] = total', LEDGER),
    Mutant("conduct-comes-after-an-error", "memory/conduct.py",
           "if error is not None and move.verb in COMES:", "if error is not None and not move.verb:", CONDUCT),
    Mutant("conduct-open-phase-not-left", "memory/conduct.py",
           "        self.end()\n        self._open = phase", "        self._open = phase", CONDUCT),
    Mutant("parking-first-copy-left-out", "memory/parking.py",
           "each.leave(copy or new)", "each.leave(copy)", ("memory/test_offload.py",), slow=True),
    Mutant("rollout-life-lost-weights-pass", "memory/rollout_life.py",
           "            self._lost = True\n", "", ("memory/test_rollout_life.py",)),
    Mutant("expected-window-of-single-experts", "memory/expected.py",
           'whole = setting.train_library == "mindspeed"', "whole = False", ("memory/test_expected.py",)),
    # tensor cache
    Mutant("batch-plan-holder-asks-another", "comm/batch_plan.py",
           "return receiver if receiver in holders else holders[receiver % len(holders)]",
           "return holders[receiver % len(holders)]", BATCH),
    Mutant("batch-plan-mini-batches-across-shares", "comm/batch_plan.py",
           "range(r * share + at, r * share + at + piece)",
           "range(at * replicas + r * piece, at * replicas + (r + 1) * piece)", BATCH),
    Mutant("micro-short-first", "comm/micro_batches.py",
           "order = sorted(range(len(units)), key=lambda at: (-tokens[at], at))",
           "order = sorted(range(len(units)), key=lambda at: (tokens[at], at))", MICRO),
    Mutant("micro-longest-to-the-first-replica", "comm/micro_batches.py",
           "key=lambda replica: (totals[replica], replica)", "key=lambda replica: replica", MICRO),
    Mutant("micro-bins-unsorted", "comm/micro_batches.py",
           "return sorted(bins, key=lambda each: -sum(costs[at] for at in each))", "return bins", MICRO),
    Mutant("micro-empty-bins", "comm/micro_batches.py",
           "(total + costs[at], held + 1, number)", "(total + costs[at], held, number)", MICRO),
    Mutant("exchange-any-step", "comm/exchange.py",
           "repr((plan.digest, step, [", "repr((plan.digest, [", ("comm/test_redistribute.py",), slow=True),
    Mutant("cache-open-after-an-error", "comm/tensor_cache.py",
           "        except BaseException:\n            self.close()\n", "        except BaseException:\n", CACHE),
    Mutant("cache-any-step", "comm/tensor_cache.py",
           "if self._step != step:", "if self._step is None:", CACHE),
    Mutant("ragged-mask-with-a-hole", "comm/ragged.py",
           "if not torch.equal(keep, mask_of(lengths, keep.shape[1], left=left, device=keep.device)):",
           "if keep.shape[1] < max(lengths, default=0):", ("comm/test_ragged.py",)),
    # rewards
    Mutant("maths-box-in-a-box", "rewards/maths.py",
           "content = None if nested else tail[start : token.start()].strip()",
           "content = tail[start : token.start()].strip()", MATHS),
    Mutant("maths-open-box", "rewards/maths.py",
           "return None if open_boxes else content", "return content", MATHS),
    Mutant("equivalence-any-side", "rewards/equivalence.py",
           "return all(side and", "return any(side and", MATHS),
    Mutant("equivalence-percent-of-small-numbers", "rewards/equivalence.py",
           "abs(float(bare_gold)) > 1 and", "abs(float(bare_gold)) > 0 and", MATHS),
    Mutant("equivalence-two-numbers", "rewards/equivalence.py",
           "_TWO_NUMBERS.search(answer) or ", "", MATHS),
    Mutant("compose-pays-without-form", "rewards/compose.py",
           "if not well_formed:", "if not well_formed and not correct:", ("rewards/test_compose.py",)),
    Mutant("learnable-short-answers-pay", "rewards/learnable.py",
           "max(len(chars), MIN_CHARS)", "max(len(chars), 1)", ("rewards/test_learnable.py",)),
    # patching
    Mutant("engine-needs-not-first", "patching/engine.py",
           "                self._install(need, need.applied, module)", "                pass", ENGINE),
    Mutant("engine-revert-in-order", "patching/engine.py",
           "            for row in reversed(self._order):\n                if row.hook is None:",
           "            for row in self._order:\n                if row.hook is None:", (*ENGINE, *ORDERS)),
    Mutant("engine-verify-other-processes-rows", "patching/engine.py",
           " and process in spec.processes and", " and", ENGINE),
    Mutant("row-rebinds-what-others-put", "patching/row.py",
           "peek(binding) is self.place.found is not MISSING", "self.place.found is not MISSING",
           ("patching/test_foreign.py", *ENGINE)),
    Mutant("hooks-import-error-passes", "patching/hooks.py",
           "if isinstance(error, ImportError):", "if isinstance(error, KeyError):", (*POLICY, *ENGINE)),
    Mutant("switches-first-pattern-wins", "patching/switches.py",
           "for pattern in self.patterns:\n            if fnmatch.fnmatchcase",
           "for pattern in reversed(self.patterns):\n            if fnmatch.fnmatchcase", ENGINE),
    Mutant("spec-replaced-class-over-its-method", "patching/spec.py",
           'if upper is outer and outer.kind != "wrap":', 'if upper is None and outer.kind != "wrap":', POLICY),
    Mutant("fingerprint-depth-does-not-count", "patching/statements.py",
           'text = f"{depth}{field}:', 'text = f"{field}:', ("patching/test_fingerprint.py",)),
    # reference ops of the emulated NPU
    Mutant("attention-masked-row-backward", "platform/cpu/ascend/ops/attention.py",
           "    top, total = top.clamp_min(torch.finfo(q.dtype).min), total.clamp_min(torch.finfo(q.dtype).tiny)\n", "",
           ("platform/test_npu_attention.py",)),
    Mutant("gating-without-eps", "platform/cpu/ascend/ops/experts.py",
           "(weights.sum(-1, keepdim=True) + eps)", "weights.sum(-1, keepdim=True)",
           ("platform/test_npu_experts.py",)),
)  # fmt: skip


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with the mutant in it. Raises StaleMutantError."""
    count = text.count(mutant.old)
    if count != 1:
        raise StaleMutantError(f"{mutant.name}: expected its old text once in {mutant.file}, found it {count} times")
    return text.replace(mutant.old, mutant.new)


def copy_repository(folder: Path) -> Path:
    """The working tree, without what git and tools keep there, in `folder`."""
    skipped = shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    return Path(shutil.copytree(ROOT, folder / "copy", ignore=skipped, symlinks=True))


def run_tests(copy: Path, tests: Sequence[str], slow: bool, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the tests pass in the copy, in time. Raises SystemExit where they cannot run at all."""
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # examples that failed under another mutant
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    marks = () if slow else ("-m", "not slow")
    files = [f"tests/{name}" for name in tests]
    command = [sys.executable, "-c", CHILD, str(copy), "-x", "-q", "--hypothesis-seed=0", *marks, *files]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except BaseException as why:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: only what was started here
        process.wait()
        if isinstance(why, subprocess.TimeoutExpired):
            return False
        raise
    if process.returncode == NOT_THE_COPY:
        raise SystemExit(f"mutants: the tests imported another verl_patches than the copy in {copy}")
    if process.returncode not in (0, 1, 2):  # passed, failed, not importable under the mutant
        raise SystemExit(f"mutants: pytest ended with {process.returncode} on {' '.join(files)}\n{said[-2000:]}")
    return process.returncode == 0


def verdict(copy: Path, mutant: Mutant) -> str:
    """killed, survived or stale; the copy is as before afterwards."""
    file = copy / "verl_patches" / mutant.file
    text = file.read_text(encoding="utf-8")
    try:
        changed = mutated(text, mutant)
    except StaleMutantError:
        return "stale"
    file.write_text(changed, encoding="utf-8")
    try:
        return "survived" if run_tests(copy, mutant.tests, mutant.slow) else "killed"
    finally:
        file.write_text(text, encoding="utf-8")


def check_control(copy: Path, mutants: Sequence[Mutant]) -> None:
    """Raise SystemExit unless every test that is to kill a mutant passes without one."""
    for slow in (False, True):
        tests = sorted({name for mutant in mutants if mutant.slow == slow for name in mutant.tests})
        if tests and not run_tests(copy, tests, slow, CONTROL_TIMEOUT_S):
            raise SystemExit(f"mutants: the control failed: {' '.join(tests)} must pass without a mutant")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Apply one mutant after another to a copy and run the tests.")
    parser.add_argument("--only", metavar="NAME", action="append", choices=[mutant.name for mutant in MUTANTS],
                        help="this mutant alone; may be given several times")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of lines")
    asked = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not asked.only or mutant.name in asked.only]
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copy_repository(Path(folder))
        with tqdm(total=len(chosen) + 1, unit="run", desc="control") as bar:
            check_control(copy, chosen)
            bar.update()
            for mutant in chosen:
                bar.set_description(mutant.name)
                started = time.monotonic()
                found[mutant.name] = verdict(copy, mutant)
                if not asked.json:
                    bar.write(f"{found[mutant.name]:8}  {time.monotonic() - started:5.1f} s  {mutant.name}")
                bar.update()
    counts = {word: list(found.values()).count(word) for word in ("killed", "survived", "stale")}
    rate = counts["killed"] / max(1, counts["killed"] + counts["survived"])
    if asked.json:
        print(json.dumps({"mutants": found, **counts, "rate": rate}))
    else:
        print(f"mutants: {counts['killed']} killed, {counts['survived']} survived, {counts['stale']} stale: "
              f"{100 * rate:.1f} % killed")  # fmt: skip
    return 0 if rate >= LEAST_KILLED and not counts["stale"] else 1


if __name__ == "__main__":
    sys.exit(main())
