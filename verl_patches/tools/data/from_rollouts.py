"""Make data from a run's recorded rollouts (step/replay/recording.py), chosen by the run's own reward.

best         rejection sampling: the best of each prompt's responses by reward (arXiv:2307.09288, section 3.2.2)
conditional  conditional SFT: prompts tagged with the reward of their response (arXiv:2308.12050); the tag is that of
             OpenRLHF's conditional_sft_processor (openrlhf/utils/processor.py)
pairs        preference pairs: the best response of each prompt as `chosen`, the worst as `rejected`

Prompts are those of the run's data: a recorded prompt is found there by its tokens, made as verl's dataset makes them.
Responses are compared within a step alone, where verl's uid groups those of a prompt. Rows are in the order of steps,
prompts and rewards, and depend only on the recording, the data and the options.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_patches.errors import ConfigError, RecipeError, our_command
from verl_patches.platform import NO_DEVICE
from verl_patches.run.environment import CONFIG_FILE, FACTS_FILE
from verl_patches.spec import RunSpec, read_run
from verl_patches.step.objectives.chat import row_tokens
from verl_patches.step.replay.recording import load_rows, recording_in
from verl_patches.tools.data.handlers import json_digest, parquet_schema, verl_row
from verl_patches.tools.data.output import TRAIN, new_folder, write_manifest, write_rows
from verl_patches.tools.data.sources import file_facts, prompt_tokens, read_rows, read_tokenizer
from verl_patches.values import loading_errors, read_yaml

COLUMNS = {"best": ("response",), "conditional": ("response",), "pairs": ("chosen", "rejected")}
REWARD_TAG = "{input} <rm_score>: {reward:.2f} "
_SCORE_TOLERANCE = 1e-6  # scores are recorded in fp32: 0.7 is 0.69999999


@dataclass(frozen=True)
class Choice:
    """Hold the options of `data from-rollouts`.

    best: with kind best, most responses of a prompt. threshold: the least reward of a response, or of a chosen one.
    margin: of pairs, the least difference of a pair's rewards, which are never equal.
    """

    kind: str = "best"
    best: int = 1
    threshold: float | None = None
    margin: float = 0.0


def write_rollout_data(
    run: Path, target: Path, choice: Choice, progress: Callable[[int], Any] = lambda steps: None
) -> dict[str, Any]:
    """Write the folder `target`, train.parquet and manifest.json, from a start of a run; return the report's counts.

    Steps of the starts that this start resumes count too.

    progress: called after each step. Raises ConfigError where the run recorded no rollouts or a file of it cannot be
    read, and RecipeError where no row is left; then nothing is written.
    """
    spec = recorded_run(run)
    steps, tokenizer = scored_steps(run), run_tokenizer(spec)
    report: dict[str, Any] = dict.fromkeys(("steps", "prompts", "responses", "rows"), 0)
    left_out: Counter[str] = Counter()
    longest = {"prompt": 0, "response": 0}
    with new_folder(target) as work:
        keys = {json_digest(row["prompt"]) for step in steps for row in load_rows(steps[step], step)}
        data = _recorded_prompts(spec, tokenizer, keys)
        file, seen = work / "out" / TRAIN, set()

        def rows() -> Iterator[dict[str, Any]]:
            for step in steps:
                for uid, key, group in _prompt_groups(steps[step], step, tokenizer, report, left_out):
                    for columns, reward in choose_rows(group, choice, left_out):
                        origin = f"{run.parent.name}, step {step}, uid {uid}, reward {reward:.6g}"
                        row = _row(data[key], columns, choice, reward, origin)
                        digest = json_digest([row["prompt"], columns])
                        if digest in seen:
                            left_out["repeated"] += 1
                            continue
                        try:
                            prompt, responses, _ = row_tokens(tokenizer, row)
                        except ValueError:  # a run would refuse the file
                            left_out["not whole in the chat template"] += 1
                            continue
                        longest["prompt"] = max(longest["prompt"], len(prompt))
                        longest["response"] = max(longest["response"], *map(len, responses.values()))
                        report["rows"] += 1
                        yield row
                        seen.add(digest)
                report["steps"] += 1
                progress(1)

        write_rows(file, rows(), parquet_schema(COLUMNS[choice.kind]))
        report["longest_tokens"] = longest
        report["left_out"] = {reason: count for reason, count in sorted(left_out.items()) if count}
        if not report["rows"]:
            why = ", ".join(f"{count} {reason}" for reason, count in report["left_out"].items())
            text = f"{run}: expected rows, found none among {report['responses']} responses ({why})"
            raise RecipeError(f"{text}; lower --threshold or --margin, or train longer")
        source = {"name": run.parent.name, "start": run.name, "steps": [*steps]}
        write_manifest(work / "out", run=source, settings=asdict(choice), report=report, files=[file_facts(file)])
    words = [f"algo={'dpo' if choice.kind == 'pairs' else 'sft'}", f"data.train_files={target / TRAIN}"]
    for part, count in longest.items():  # not below the run's, which its validation data may need
        words.append(f"data.max_{part}_length={max(count, spec.verl.data[f'max_{part}_length'])}")
    command = our_command("train", "--config-name", "CONFIG", *words)
    if spec.platform in NO_DEVICE:
        command = our_command("smoke.sh", *words)
    return {**report, "files": [str(target / TRAIN)], "command": command}


def recorded_run(run: Path) -> RunSpec:
    """Return the facts of a run from the folder of a start; raise ConfigError where they cannot be read."""
    with loading_errors(f"{run}: expected the folder of a run, with {CONFIG_FILE} and {FACTS_FILE}"):
        return read_run((run / FACTS_FILE).read_text(), OmegaConf.create(read_yaml(run / CONFIG_FILE)))


def scored_steps(run: Path) -> dict[int, Path]:
    """Return {step: folder} of the steps whose responses and rewards are recorded; raise ConfigError without any."""
    steps = recording_in(run)
    scored = {n: folder for n, folder in steps.items() if (folder / f"scores_{n}.safetensors").is_file()}
    if scored:
        return scored
    found = f"{len(steps)} steps without rewards, as no update followed" if steps else "none"
    text = f"{run}: expected recorded rollouts and their rewards, found {found}"
    raise ConfigError(f"{text}; give a run that samples, with recipe.rollout.record=true")


def run_tokenizer(spec: RunSpec) -> Any:
    """Return the tokenizer of a run; raise ConfigError where it cannot be read."""
    data = spec.verl.data
    path, trusted = data.tokenizer or str(spec.model_folder), bool(data.get("trust_remote_code"))
    return read_tokenizer(path, trusted, "the run's tokenizer (copy its model to this path)")


def _recorded_prompts(spec: RunSpec, tokenizer: Any, wanted: set[int]) -> dict[int, Any]:
    """Return {digest of ids: row} of the wanted prompts, made and cut as in verl's dataset (rl_dataset.py)."""
    data, found, most = spec.verl.data, dict[int, Any](), spec.verl.data.max_prompt_length
    head = {"left": 0, "middle": most // 2}.get(data.truncation, most)  # tokens that a cut keeps of the begin
    files = [data.train_files] if isinstance(data.train_files, str) else data.train_files
    for file in files:
        with loading_errors(f"{file}: expected the run's data, unchanged (restore it if it was moved or edited)"):
            for _, row in read_rows(Path(file)):
                prompt = row[data.prompt_key]
                ids = prompt_tokens(tokenizer, prompt)
                if len(ids) > most:
                    ids = ids[:head] + ids[len(ids) - most + head :]
                key = json_digest(ids)
                if key in wanted:
                    found.setdefault(key, {**row, "prompt": prompt})
    if missing := len(wanted - found.keys()):
        raise ConfigError(
            f"{', '.join(files)}: expected all {len(wanted)} recorded prompts, found {len(wanted) - missing}; "
            "restore the run's data, tokenizer and chat template as they were when it ran"
        )
    return found


def _prompt_groups(
    folder: Path, step: int, tokenizer: Any, report: dict[str, Any], left_out: Counter[str]
) -> Iterator[tuple[str, int, list[tuple[str, float]]]]:
    """Yield (uid, prompt digest, (text, reward)s) in the order of first rows, without repeated and empty texts."""
    groups: dict[str, tuple[int, dict[str, float]]] = {}
    for row in load_rows(folder, step):
        _, texts = groups.setdefault(row["uid"], (json_digest(row["prompt"]), {}))
        text, score = tokenizer.decode(row["response"], skip_special_tokens=True), row["score"]
        report["responses"] += 1
        if not text:
            left_out["empty"] += 1
        elif not math.isfinite(score):
            left_out["without a finite reward"] += 1
        elif text in texts:
            left_out["repeated"] += 1
        else:
            texts[text] = score
    report["prompts"] += len(groups)
    yield from ((uid, key, [*texts.items()]) for uid, (key, texts) in groups.items())


def choose_rows(
    group: list[tuple[str, float]], choice: Choice, left_out: Counter[str]
) -> Iterator[tuple[dict[str, str], float]]:
    """Yield ({column: text}, reward) of one prompt's rows; the reward of a pair is the difference of its rewards."""
    group = sorted(group, key=lambda each: -each[1])  # the first of equal rewards stays first
    good = [each for each in group if choice.threshold is None or each[1] >= choice.threshold - _SCORE_TOLERANCE]
    if choice.kind == "pairs":
        margin = good[0][1] - group[-1][1] if good else 0.0
        if margin > 0 and margin >= choice.margin - _SCORE_TOLERANCE:
            yield {"chosen": good[0][0], "rejected": group[-1][0]}, margin
        else:
            left_out["prompts within the margin" if good else "prompts below the threshold"] += 1
        return
    most = choice.best if choice.kind == "best" else len(good)
    left_out.update({"below the threshold": len(group) - len(good), "not among the best": len(good[most:])})
    yield from (({"response": text}, reward) for text, reward in good[:most])


def _row(data: Any, columns: dict[str, str], choice: Choice, reward: float, origin: str) -> dict[str, Any]:
    messages = [{"role": one["role"], "content": one["content"]} for one in data["prompt"]]
    if choice.kind == "conditional":
        messages[-1]["content"] = REWARD_TAG.format(input=messages[-1]["content"], reward=reward)
    answer = (data.get("reward_model") or {}).get("ground_truth")
    answer, source = "" if answer is None else str(answer), data.get("data_source") or ""
    return verl_row(source, {"prompt": messages, **columns}, data.get("ability") or "", answer, origin)
