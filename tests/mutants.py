"""Mutation test of planners, memory schedule, tensor cache, rewards, patches, cluster, watch, checkpoints; run by hand.

    .venv/bin/python tests/mutants.py [--only NAME ...]

Copies the repository to a temporary folder and applies one mutant of MUTANTS after another there; its tests must pass
without it (the control) and are run with it. The working tree is never written to. Each run is a fork of this process,
which has imported pytest and torch but nothing of verl_patches.

killed: a test fails, or the run ends after TIMEOUT_S; survived: all pass. Exit code 0: at least 90 % killed; 1: fewer,
or, before anything is run, a mutant that is stale: its old text is not exactly once in the file, or changes no code; 2:
wrong arguments.
"""

from __future__ import annotations

import argparse
import ast
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
LEAST_KILLED = 0.9
TIMEOUT_S = 600
NOT_THE_COPY, OUTPUT = 90, "mutants-output.txt"


class Tests(NamedTuple):
    """Files below tests/, separated by spaces; of these the quick tests that `keyword` (pytest -k) selects."""

    files: str
    keyword: str = ""

    @property
    def paths(self) -> list[str]:
        """The files, from the repository's root."""
        return [f"tests/{name}" for name in self.files.split()]


class Mutant(NamedTuple):
    """`old`, exactly once in verl_patches/`file`, becomes `new`; one of `tests` must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: Tests


PLAN = Tests("reshard/test_plan.py", "not 671b and not published and not mixes")
BIG_PLAN = Tests("reshard/test_plan.py", "671b")
SENDERS = Tests("reshard/test_plan.py", "holders_send or room or nearer or few")
CHECK = Tests("reshard/test_check.py")
LAYOUT, SHARDING = Tests("layout/test_parallel.py"), Tests("layout/test_sharding.py")
SCHEDULE, LEDGER = Tests("memory/test_schedule.py", "not whatever"), Tests("memory/test_ledger.py")
SCHEDULER = Tests("memory/test_scheduler.py")
BATCH, MICRO = Tests("batches/test_batch_plan.py"), Tests("batches/test_micro_batches.py", "not torch")
CACHE = Tests("batches/test_tensor_cache.py")
BOXES, EQUAL = Tests("rewards/test_maths.py", "closed"), Tests("rewards/test_equivalence.py", "as_the_file_says")
TEX = Tests("rewards/test_tex.py")
YAML = Tests("config/test_yaml_files.py")
ENGINE, SPEC = Tests("patching/test_engine.py"), Tests("patching/test_spec.py")
CLUSTER = Tests("cluster/test_hosts.py cluster/test_command.py cluster/test_node.py")
FOLDERS, START = Tests("weights/test_run_folders.py"), Tests("launch/test_run_folder.py")
MANIFEST = Tests("weights/test_manifest.py", "covers")
FOREIGN = Tests("patching/test_foreign.py patching/test_engine.py")
ORDER_KEY = "(len(blocks[i].holders), -router.sizes[i], i)"

MUTANTS = (
    # reshard
    Mutant("route-small-blocks-first", "reshard/plan.py",
           ORDER_KEY, "(len(blocks[i].holders), router.sizes[i], i)", SENDERS),
    Mutant("route-many-holders-first", "reshard/plan.py",
           ORDER_KEY, "(-len(blocks[i].holders), -router.sizes[i], i)", SENDERS),
    Mutant("route-may-always-send", "reshard/plan.py",
           "return load + size <= mean or load <= min(self.load[rank] for rank in holders) + AHEAD * mean",
           "return True", SENDERS),
    Mutant("route-first-holder-sends", "reshard/plan.py",
           "heapq.heapreplace(waiting, (self.load[sender], sender))", "pass", SENDERS),
    Mutant("schedule-crumbs", "reshard/plan.py",
           "self.least = -(-bucket_bytes // CUT)", "self.least = 1", SENDERS),
    Mutant("schedule-idle-senders-first", "reshard/plan.py",
           "key=lambda r: (-self.to_send[r], r)", "key=lambda r: (self.to_send[r], r)", BIG_PLAN),
    Mutant("schedule-idle-receivers-first", "reshard/plan.py",
           "key=lambda r: (-self.to_receive[r], r)", "key=lambda r: (self.to_receive[r], r)", BIG_PLAN),
    Mutant("blocks-holders-of-a-part", "reshard/blocks.py",
           "if a <= start and stop <= b)", "if a <= start)", PLAN),
    Mutant("plan-digest-of-inputs-only", "reshard/plan.py",
           'digest.update(array("q", [number for piece in self.pieces for number in piece[:-1]]).tobytes())',
           "pass", PLAN),
    Mutant("sizes-not-aligned", "reshard/region.py",
           "return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES", "return size_bytes", PLAN),
    Mutant("contains-start-of-the-held-region", "reshard/region.py",
           "held.start <= wanted.start < wanted.stop <= held.stop",
           "wanted.start < wanted.stop <= held.stop", CHECK),
    Mutant("check-segment-order", "reshard/check.py",
           "if sent != expected or not sent", "if sorted(sent) != sorted(expected) or not sent", CHECK),
    Mutant("coverage-of-the-first-run-alone", "reshard/live_memory.py",
           "np.subtract.at(changes, np.searchsorted(bounds, runs[:, 1]), 1)",
           "np.subtract.at(changes, np.searchsorted(bounds, runs[:1, 1]), 1)",
           Tests("reshard/test_live_memory.py")),
    Mutant("checksum-of-any-place", "reshard/verify.py",
           "place = row[:, None] * shape[1] + column", "place = row[:, None] + column",
           Tests("reshard/test_verify.py", "checksum")),
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
           '["tp", "cp", "pp", "edp"]', '["tp", "cp", "pp"]', LAYOUT),
    Mutant("static-bytes-without-cp", "layout/sharding.py",
           "(layout.dp * layout.cp)", "layout.dp", Tests("layout/test_sharding.py")),
    # memory
    Mutant("memory-schedule-every-move-counts", "memory/schedule.py",
           "does = size > 0 and loads != (move.group in now)", "does = size > 0", SCHEDULE),
    Mutant("memory-schedule-peak-of-the-first-step-only", "memory/schedule.py",
           "highest = max(moment, first[name], key=lambda each: each.peak_bytes)", "highest = first[name]", SCHEDULE),
    Mutant("ledger-growth-past-full", "memory/ledger.py",
           "(there and entry.grows and held < wanted)", "(there and entry.grows)", LEDGER),
    Mutant("ledger-variable-bytes-never-leave", "memory/ledger.py",
           "(entry.may_stay and not self.schedule.releases(group, phase))", "entry.may_stay", LEDGER),
    Mutant("ledger-peak-is-the-last", "memory/ledger.py",
           'record["peak_bytes"] = max(record["peak_bytes"], total)', 'record["peak_bytes"] = total', LEDGER),
    Mutant("scheduler-comes-after-an-error", "memory/scheduler.py",
           "if error is not None and move.verb in LOADS:", "if error is not None and not move.verb:", SCHEDULER),
    Mutant("scheduler-open-phase-not-left", "memory/scheduler.py",
           "        self.end()\n        self._open = phase", "        self._open = phase", SCHEDULER),
    Mutant("host-backed-first-copy-left-out", "memory/host_backed.py",
           "storage.offload(copy or storage in fresh)", "storage.offload(copy)",
           Tests("memory/test_offload.py", "stale_host_copy")),
    Mutant("sleep-mode-lost-weights-pass", "memory/sleep_mode.py",
           "            self._lost = True\n", "", Tests("memory/test_sleep_mode.py")),
    Mutant("sleep-counts-the-cache-of-torch-as-freed", "memory/sleep_mode.py",
           "sum(given_up.values()) + max(0, cached - _cached_bytes(device))", "sum(given_up.values())",
           Tests("memory/test_sleep_mode.py", "gives_back_of_its_cache")),
    Mutant("sleep-does-not-empty-the-cache-at-the-start", "worker/rollout_engine.py",
           "if here.scheduler is None:", "if here.scheduler is not None:",
           Tests("memory/test_sleep_mode.py", "must_be_the_devices_again")),
    Mutant("rollout-engine-wakes-what-is-awake", "worker/rollout_engine.py",
           "if tag not in self.awake and (tags is None or tag in tags):", "if tags is None or tag in tags:",
           Tests("memory/test_sleep_mode.py", "what_is_awake")),
    Mutant("expected-window-of-single-experts", "planning/expected.py",
           'stacked = setting.train_library == "mindspeed"', "stacked = False", Tests("planning/test_expected.py")),
    Mutant("activations-router-without-its-mask", "planning/activations.py",
           "tokens * (5 * experts", "tokens * (4 * experts", Tests("planning/test_activations.py", "256_die")),
    # micro batches
    Mutant("packing-order-not-inverted", "batches/micro_batches.py",
           "torch.tensor(list(chain.from_iterable(self.rows))).argsort()",
           "torch.tensor(list(chain.from_iterable(self.rows)))", Tests("batches/test_dynamic_batches.py", "order_of")),
    # tensor cache
    Mutant("batch-plan-shares-overlap", "batches/batch_plan.py",
           "range(samples * rank // world, samples * (rank + 1) // world)",
           "range(samples * rank // world, samples * (rank + 1) // world + 1)", BATCH),
    Mutant("batch-plan-mini-batches-across-shares", "batches/batch_plan.py",
           "range(r * share + at, r * share + at + piece)",
           "range(at * replicas + r * piece, at * replicas + (r + 1) * piece)", BATCH),
    Mutant("micro-short-first", "batches/batch_plan.py",
           "key=lambda sample: -lengths[sample])", "key=lambda sample: lengths[sample])", MICRO),
    Mutant("micro-longest-to-the-first-replica", "batches/batch_plan.py",
           "key=lambda replica: (tokens[replica], totals[replica], replica)", "key=lambda replica: replica", MICRO),
    Mutant("micro-bins-unsorted", "batches/batch_plan.py",
           "return sorted(bins, key=lambda each: -sum(costs[at] for at in each))", "return bins", MICRO),
    Mutant("micro-empty-bins", "batches/batch_plan.py",
           "(total + costs[at], held + 1, number)", "(total + costs[at], held, number)", MICRO),
    Mutant("exchange-any-step", "batches/exchange.py",
           "repr((plan.digest, step, [", "repr((plan.digest, [",
           Tests("batches/test_redistribute.py", "odd_rank")),
    Mutant("cache-open-after-an-error", "batches/cache.py",
           "        except BaseException:\n            self.close()\n", "        except BaseException:\n", CACHE),
    Mutant("cache-any-step", "batches/cache.py",
           "if self._step != step:", "if self._step is None:", CACHE),
    Mutant("ragged-mask-with-a-hole", "batches/exchange.py",
           "if not torch.equal(keep, mask_of(lengths, keep.shape[1], left=left, device=keep.device)):",
           "if keep.shape[1] < max(lengths, default=0):", Tests("batches/test_ragged.py")),
    # rewards
    Mutant("maths-box-in-a-box", "rewards/maths.py",
           "content = None if nested else tail[start : token.start()].strip()",
           "content = tail[start : token.start()].strip()", BOXES),
    Mutant("maths-open-box", "rewards/maths.py",
           "return None if open_boxes else content", "return content", BOXES),
    Mutant("equivalence-any-side", "rewards/equivalence.py",
           "return all(side and", "return any(side and", EQUAL),
    Mutant("equivalence-percent-of-small-numbers", "rewards/equivalence.py",
           "abs(float(bare_gold)) > 1 and", "abs(float(bare_gold)) > 0 and", EQUAL),
    Mutant("equivalence-two-numbers", "rewards/equivalence.py",
           "has_adjacent_numbers(answer) or ", "", EQUAL),
    Mutant("tex-two-exponents", "rewards/tex.py", "if token in scripts:", "if False:", TEX),
    Mutant("tex-factors-are-mixed-numbers", "rewards/tex.py",
           "if token in _FRACTIONS and parts and self._multiplies(_FRACTIONS[token], parts):", "if False:", TEX),
    Mutant("equivalence-signs-together", "rewards/answer_text.py",
           'if not signs or is_set or len(signs) > MAX_SIGNS or (signs.count("pm") > 1 and "mp" in signs):',
           "if not signs or is_set or len(signs) > MAX_SIGNS:", Tests("rewards/test_equivalence.py", "signs")),
    Mutant("equivalence-any-dollar", "rewards/equivalence.py", "_UNSAFE.search(answer) or ", "", EQUAL),
    Mutant("maths-pays-without-form", "rewards/maths.py",
           "if well_formed else 0.0", "", Tests("rewards/test_maths.py")),
    Mutant("learnable-short-answers-pay", "rewards/learnable.py",
           "max(len(chars), MIN_CHARS)", "max(len(chars), 1)", Tests("rewards/test_learnable.py")),
    # YAML and secrets
    Mutant("yaml-aliases", "yaml_files.py", "elif isinstance(event, yaml.AliasEvent):", "elif False:", YAML),
    Mutant("yaml-depth", "yaml_files.py", "if depth > MAX_DEPTH:", "if False:", YAML),
    Mutant("yaml-values", "yaml_files.py", "if values > MAX_VALUES:", "if False:", YAML),
    Mutant("secrets-by-name-alone", "values.py",
           "return is_secret_value(value) or (", "return bool(", Tests("config/test_values.py", "secrets")),
    # patching
    Mutant("engine-needs-not-first", "patching/engine.py",
           "                self._install(need, need.applied, module)", "                pass", ENGINE),
    Mutant("engine-revert-in-order", "patching/engine.py",
           "            for row in reversed(self._order):\n                if row.hook is None:",
           "            for row in self._order:\n                if row.hook is None:", ENGINE),
    Mutant("engine-verify-other-processes-rows", "patching/engine.py",
           " and process in spec.processes and", " and", ENGINE),
    Mutant("row-rebinds-what-others-put", "patching/row.py",
           "peek(binding) is self.place.found is not MISSING", "self.place.found is not MISSING", FOREIGN),
    Mutant("hooks-import-error-passes", "patching/hooks.py",
           "if isinstance(error, ImportError):", "if isinstance(error, KeyError):", ENGINE),
    Mutant("switches-first-pattern-wins", "patching/switches.py",
           "for pattern in self.patterns:\n            if fnmatch.fnmatchcase",
           "for pattern in reversed(self.patterns):\n            if fnmatch.fnmatchcase", SPEC),
    Mutant("spec-replaced-class-over-its-method", "patching/spec.py",
           'if upper is outer and outer.kind != "wrap":', 'if upper is None and outer.kind != "wrap":', SPEC),
    Mutant("fingerprint-depth-does-not-count", "patching/fingerprint.py",
           'text = f"{depth}{field}:', 'text = f"{field}:', Tests("patching/test_fingerprint.py", "place_of")),
    Mutant("fingerprint-every-file-is-reviewed", "patching/fingerprint.py",
           "path and file_hash(path) == files[module]", "path",
           Tests("patching/test_fingerprint.py", "reviewed_bytes")),
    # rates and traces
    Mutant("flops-of-all-experts", "layout/flops.py",
           "active(model.num_experts_per_tok if moe else 0)", "active(model.n_routed_experts if moe else 0)",
           Tests("layout/test_flops.py")),
    Mutant("trace-goes-on-after-its-phase", "worker/context.py",
           "            self.profiler.begin(phase)", "            phase and self.profiler.begin(phase)",
           Tests("trainer/test_profile.py", "phase_alone")),
    # the watch, and restarts
    Mutant("bound-without-the-model", "watch/bounds.py",
           "self.factor * max(modelled_s, longest_s)", "self.factor * longest_s",
           Tests("watch/test_stall.py", "own_bound")),
    Mutant("bound-every-validation-as-the-first", "watch/bounds.py",
           "beat.call == VALIDATE and beat.place not in beat.longest_s", "beat.call == VALIDATE",
           Tests("watch/test_stall.py", "own_bound")),
    Mutant("stall-a-rank-that-goes-on-waits", "watch/stall.py",
           "[seen for seen in busy if seen.still_s > bounds.of_wait(seen)]", "busy",
           Tests("watch/test_stall.py", "wait_for_too_long")),
    Mutant("stall-a-still-rank-waits", "watch/stall.py",
           "waiting = [seen for seen in still if _waits(seen, awaited)]", "waiting = still",
           Tests("watch/test_stall.py", "wait_for_too_long")),
    Mutant("stall-who-waits-in-the-start-is-a-culprit", "watch/stall.py",
           "culprits = () if _missing(ranks, world) else", "culprits =",
           Tests("watch/test_stall.py", "start_that_hangs")),
    Mutant("stall-equal-numbers-wait", "watch/stall.py",
           "if seen.beat.groups[group] < other.beat.groups[group]:",
           "if seen.beat.groups[group] <= other.beat.groups[group]:",
           Tests("watch/test_stall.py", "others_wait_for")),
    Mutant("beat-without-its-checksum", "watch/heartbeat.py",
           "if zlib.crc32(rest[:size]) == check:", "if True:",
           Tests("watch/test_heartbeat.py", "damaged")),
    Mutant("end-spares-the-stopped", "watch/node.py",
           'if failed and seen.state != "gone"]', 'if failed and seen.state not in ("gone", "T")]',
           Tests("watch/test_heartbeat.py", "kills_stopped")),
    Mutant("collective-blamed-at-once", "launch/restart.py",
           "if raised != COLLECTIVE:", "if raised is not None:",
           Tests("launch/test_restart.py", "of_a_collective_the_second_time")),
    Mutant("restart-on-a-node-too-few", "launch/restart.py",
           "if len(others) < self.given.trainer.nnodes:", "if len(others) + 1 < self.given.trainer.nnodes:",
           Tests("launch/test_restart.py", "where_a_spare_one")),
    # checkpoints of a run
    Mutant("retention-removes-what-was-written", "weights/run_folders.py",
           "if found[step] != written and", "if", FOLDERS),
    Mutant("retention-removes-what-others-began-from", "weights/run_folders.py",
           " and (found[step].parents[1], step) not in began", "", FOLDERS),
    Mutant("later-steps-of-an-ancestor-count", "weights/run_folders.py",
           "return self.last is None or step <= self.last", "return True", FOLDERS),
    Mutant("steps-beyond-the-total", "weights/run_folders.py", "step >= total", "step > total", FOLDERS),
    Mutant("auto-begins-anew", "config/run_start.py", "    if other is None:", "    if True:", START),
    Mutant("manifest-without-a-digest", "weights/manifest.py",
           'if found.get("digest") != content_digest(found):', "if False:", MANIFEST),
    # reference ops of the emulated NPU
    Mutant("attention-masked-row", "emulation/ascend/attention.py",
           "total.clamp_min(torch.finfo(total.dtype).tiny)", "total",
           Tests("platform/test_npu_attention.py")),
    Mutant("gating-without-eps", "emulation/ascend/ops.py",
           "(weights.sum(-1, keepdim=True) + eps)", "weights.sum(-1, keepdim=True)",
           Tests("emulation/test_npu_ops.py")),
    # shared files
    Mutant("whole-write-leaves-its-part", "shared_files.py",
           "        partial.unlink(missing_ok=True)", "        pass", Tests("test_shared_files.py")),
    Mutant("appended-is-read-twice", "shared_files.py",
           "self.offset += len(block)", "self.offset += 0", Tests("test_shared_files.py")),
    # cluster
    Mutant("cluster-dead-nodes-count", "cluster/node.py",
           'alive = {node["rank"] for node in of_job if node["alive"]}', 'alive = {node["rank"] for node in of_job}',
           CLUSTER),
    Mutant("cluster-foreign-nodes-count", "cluster/node.py",
           'of_job = [node for node in nodes if node["job"] == job.name]', "of_job = list(nodes)", CLUSTER),
    Mutant("cluster-ends-refused-hosts", "cluster/hosts.py",
           "for rank, answer in answers.items() if answer.code != 2]", "for rank, answer in answers.items()]", CLUSTER),
    Mutant("cluster-ends-an-earlier-up", "cluster/hosts.py",
           "if not any(ALREADY in answer.error for answer in answers.values()):", "if True:", CLUSTER),
    Mutant("cluster-takes-foreign-containers", "cluster/hosts.py",
           '[ "$label" = {job.name} ] ||', "true ||", CLUSTER),
    Mutant("cluster-loses-secrets", "cluster/hosts.py",
           'self.secrets if verb == "up" else None', 'self.secrets if verb == "down" else None', CLUSTER),
    Mutant("cluster-rank-of-n", "cluster/place.py",
           "if not 0 <= rank < job.nodes:", "if not 0 <= rank <= job.nodes:", CLUSTER),
    Mutant("cluster-starts-a-second-command", "cluster/command.py",
           "if before is not None and before.runs:", "if before is None:", CLUSTER),
    Mutant("cluster-command-dies-with-its-caller", "cluster/command.py",
           "start_new_session=True", "start_new_session=False", CLUSTER),
    Mutant("cluster-killed-command-has-a-code", "cluster/command.py",
           "    if code is None:\n        raise", "    if code == -1:\n        raise", CLUSTER),
    Mutant("cluster-refused-beside-another-up-is-a-failure", "cluster/node.py",
           'return ConfigError(f"{text}; wait', 'return RecipeError(f"{text}; wait', CLUSTER),
    Mutant("cluster-removes-containers-without-their-logs", "cluster/hosts.py",
           "self._remove_containers([rank for rank in ended if rank not in faults])", "self._remove_containers()",
           CLUSTER),
    Mutant("cluster-reads-what-profiles-print", "cluster/hosts.py",
           "answer.output.partition(BEGUN)[2]", "answer.output", CLUSTER),
    Mutant("cluster-follows-an-older-command", "cluster/hosts.py",
           "line if MARK in options else", "line if options == () else", CLUSTER),
    Mutant("cluster-keeps-a-container-of-another-image", "cluster/hosts.py",
           '[ "$digest" = {job.digest} ] ||', "true ||", CLUSTER),
    Mutant("cluster-slurm-tasks-submit-again", "cluster/render.py",
           "as_text(of_a_node(job))", "as_text(job)", Tests("cluster/test_render.py", "batch_script_gives")),
)  # fmt: skip


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with the mutant in it. Raises ValueError for a stale one, and SyntaxError."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.name}: expected its old text once in {mutant.file}, found it {count} times")
    new = text.replace(mutant.old, mutant.new)
    if ast.dump(ast.parse(new, mutant.name)) == ast.dump(ast.parse(text)):
        raise ValueError(f"{mutant.name}: changes no code of {mutant.file}")
    return new


def check_all_apply(mutants: Sequence[Mutant]) -> None:
    """Raise SystemExit that names each stale mutant."""
    faults = []
    for mutant in mutants:
        try:
            mutated((ROOT / "verl_patches" / mutant.file).read_text(encoding="utf-8"), mutant)
        except (OSError, SyntaxError, ValueError) as why:
            faults.append(str(why))
    if faults:
        raise SystemExit("mutants: stale, nothing was run:\n  " + "\n  ".join(faults))


def copy_repository(folder: Path) -> Path:
    """The working tree, without what git and tools keep there, in `folder`."""
    skipped = shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    return Path(shutil.copytree(ROOT, folder / "copy", ignore=skipped, symlinks=True))


def run_tests(copy: Path, tests: Tests) -> bool:
    """Whether the tests pass in the copy within TIMEOUT_S. Raises SystemExit if pytest cannot run them."""
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # examples that failed under another mutant
    arguments = ["-x", "-q", "--hypothesis-seed=0", "-m", "not slow", "-k", tests.keyword, *tests.paths]
    child = multiprocessing.get_context("fork").Process(target=_run_in_child, args=(copy, arguments))
    child.start()
    try:
        child.join(TIMEOUT_S)
    finally:
        if late := child.is_alive():
            os.killpg(child.pid, signal.SIGKILL)  # its own session: only what was started here
            child.join()
    if child.exitcode == NOT_THE_COPY:
        raise SystemExit(f"mutants: the tests imported another verl_patches than the copy in {copy}")
    if not late and child.exitcode not in (0, 1, 2):  # passed, failed, not importable under the mutant
        output = (copy / OUTPUT).read_text(errors="replace")
        raise SystemExit(f"mutants: pytest ended with {child.exitcode} on {' '.join(arguments)}\n{output[-2000:]}")
    return child.exitcode == 0


def _run_in_child(copy: Path, arguments: list[str]) -> None:
    os.setsid()
    os.chdir(copy)
    with open(OUTPUT, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[0] = str(copy)  # this script's folder before; an editable install of the working tree comes later
    import verl_patches

    of_copy = Path(verl_patches.__file__).is_relative_to(copy)
    sys.exit(int(pytest.main(arguments)) if of_copy else NOT_THE_COPY)


def verdict(copy: Path, mutant: Mutant) -> str:
    """killed or survived; the copy is as before afterwards."""
    file = copy / "verl_patches" / mutant.file
    text = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutated(text, mutant), encoding="utf-8")
        return "survived" if run_tests(copy, mutant.tests) else "killed"
    finally:
        file.write_text(text, encoding="utf-8")


@functools.cache
def check_control(copy: Path, tests: Tests) -> None:
    """Raise SystemExit unless tests that are to kill a mutant pass without one; run once for equal tests."""
    if not run_tests(copy, tests):
        raise SystemExit(f"mutants: the control failed: {' '.join(tests.paths)} must pass without a mutant")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Apply one mutant after another to a copy and run the tests.")
    names = [mutant.name for mutant in MUTANTS]
    only = "this mutant alone; may be given several times"
    parser.add_argument("--only", metavar="NAME", action="append", choices=names, help=only)
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not given.only or mutant.name in given.only]
    check_all_apply(chosen)
    verdicts: dict[str, str] = {}
    import hypothesis  # noqa: F401 for the forks
    import torch  # noqa: F401

    tqdm.monitor_interval = 0  # no thread beside the forks
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, tqdm(chosen, unit="mutant") as bar:
        copy = copy_repository(Path(folder))
        for mutant in bar:
            bar.set_description(mutant.name)
            started = time.monotonic()
            check_control(copy, mutant.tests)
            verdicts[mutant.name] = verdict(copy, mutant)
            bar.write(f"{verdicts[mutant.name]:8}  {time.monotonic() - started:5.1f} s  {mutant.name}")
    counts = {word: list(verdicts.values()).count(word) for word in ("killed", "survived")}
    rate = counts["killed"] / max(1, counts["killed"] + counts["survived"])
    numbers = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"mutants: {numbers}: {100 * rate:.1f} % killed")
    return 0 if rate >= LEAST_KILLED else 1


if __name__ == "__main__":
    sys.exit(main())
