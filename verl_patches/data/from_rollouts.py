"""Data of a run's recorded rollouts (replay/recording.py): what its own reward makes of its responses.

best         rejection sampling: of each prompt's responses the best by reward (arXiv:2307.09288, section 3.2.2)
conditional  conditional SFT: each response, behind a prompt that is tagged with its reward (arXiv:2308.12050); the
             default tag is that of OpenRLHF's conditional_sft_processor (openrlhf/utils/processor.py)
pairs        preference pairs: the best response of each prompt as `chosen`, the worst as `rejected`

Prompts are those of the run's data: a recorded prompt is found there by its tokens, made as verl's dataset makes them.
A prompt's group is that of one step (verl's uid). Rows are in the order of steps, of groups in a step, and of scores;
the output depends on the recording, the data and the options alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl_patches.config.environment import COMPOSED
from verl_patches.config.files import recorded_bytes
from verl_patches.data.handlers import Row, schema_of, verl_row
from verl_patches.data.output import MANIFEST, TRAIN, whole_folder, write_rows
from verl_patches.data.sources import file_facts
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.model_folder import safetensors_header
from verl_patches.layout.phases import samples
from verl_patches.trainer.record import run_id
from verl_patches.values import size_text
from verl_patches.yaml_files import read_yaml

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

Kind = Literal["best", "conditional", "pairs"]
COLUMNS: dict[str, tuple[str, ...]] = {
    "best": ("response",),
    "conditional": ("response",),
    "pairs": ("chosen", "rejected"),
}
TEMPLATE = "{input} <rm_score>: {reward} "
_SLACK = 1e-6  # scores are recorded in fp32: 0.7 is 0.69999999
_BATCH = 1024  # rows of the data that are tokenized at once
_RECORDED = ("prompts", "responses", "attention_mask")
_SCORED = ("score", "uid")
_OF_ROW = ("data_source", "ability", "reward_model")  # columns of the data that a row of the output has, too


@dataclass(frozen=True)
class Choice:
    """What is made of the responses.

    best: of a prompt's at most. threshold: the least reward of a response, or of the chosen one of a pair. margin: the
    least difference of a pair's rewards, which is above 0 in any case. finished: responses that were cut at the length
    limit are left out. template: of the last message of a tagged prompt. from_step: the first step that is read.
    """

    kind: Kind = "best"
    best: int = 1
    threshold: float | None = None
    margin: float = 0.0
    finished: bool = False
    template: str = TEMPLATE
    from_step: int = 1

    def __post_init__(self):
        if self.kind not in COLUMNS:
            raise ConfigError(f"from-rollouts: --to {self.kind}: expected {', '.join(COLUMNS)}")
        if self.best < 1 or not self.margin >= 0 or not math.isfinite(self.margin + (self.threshold or 0.0)):
            given = f"--best {self.best}, --margin {self.margin}, --threshold {self.threshold}"
            raise ConfigError(f"from-rollouts: {given}: expected a best of 1 or more, a margin from 0, finite numbers")
        if "{input}" not in self.template or "{reward}" not in self.template:
            raise ConfigError(
                f"from-rollouts: --template {self.template!r}: expected a text with {{input}} and {{reward}}"
            )


@dataclass
class _Response:
    """One response of a group; `ids`: its tokens."""

    score: float
    ids: list[int]
    is_cut: bool


def from_rollouts(
    run: Path,
    target: Path,
    choice: Choice,
    overwrite: bool = False,
    progress: Callable[[int], Any] = lambda steps: None,
) -> dict[str, Any]:
    """Write the folder `target`, train.parquet and manifest.json, from the run in folder `run`; returns the report.

    progress: called after each step. ConfigError where the run recorded no rollouts, or its data, tokenizer or a
    recorded step cannot be read; RecipeError where no row is left. In both cases nothing is written.
    """
    from omegaconf import OmegaConf

    config = OmegaConf.create(read_yaml(run / COMPOSED))
    steps = scored_steps(run, config, choice.from_step)
    tokenizer = _tokenizer(config)
    report: dict[str, Any] = {"steps": len(steps), "prompts": 0, "responses": 0}
    left_out: Counter[str] = Counter()
    with whole_folder(target, overwrite) as work:
        found = _prompts_of_data(config, tokenizer, {key for step in steps for key in _keys(run, step).values()})
        rows = _rows(run, steps, choice, tokenizer, found, report, left_out, progress)
        report["rows"] = write_rows(work / "out" / TRAIN, rows, schema_of(COLUMNS[choice.kind]))
        report["left_out"] = {reason: count for reason, count in sorted(left_out.items()) if count}
        if not report["rows"]:
            why = ", ".join(f"{count} {reason}" for reason, count in report["left_out"].items())
            raise RecipeError(
                f"{run}: no row is left of {report['responses']} responses ({why}); lower --threshold or --margin, or "
                "train longer"
            )
        manifest = {
            "format": "verl_patches data",
            "version": 1,
            "run": {"name": run.name, "id": run_id(run), "steps": steps},
            "settings": asdict(choice),
            "report": report,
            "files": [file_facts(work / "out" / TRAIN)],
        }
        (work / "out" / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return {**report, "files": [str(target / TRAIN)]}


def scored_steps(run: Path, config: DictConfig, first: int = 1) -> list[int]:
    """The steps from `first` on whose responses and scores are recorded. ConfigError without one."""
    folder = run / "rollouts"
    names = {path.name for path in folder.glob("*.safetensors")}
    steps = sorted(int(name[5:-12]) for name in names if name.startswith("step_") and name[5:-12].isdecimal())
    scored = [step for step in steps if step >= first and f"scores_{step}.safetensors" in names]
    if scored:
        return scored
    if not samples(config.recipe):
        raise ConfigError(f"{run} trained on fixed data: it has no rollouts; give a run that samples")
    if not steps:
        size = size_text(recorded_bytes(config))
        raise ConfigError(
            f"{run} recorded no rollouts: expected {folder}/step_N.safetensors; run it with "
            f"recipe.rollout.record=true, {size} a step (modelled)"
        )
    raise ConfigError(
        f"{run} has no scores of steps from {first} on, found responses of steps {steps[0]} to {steps[-1]}: an earlier "
        "version recorded them, or no update followed; run it again"
    )


def _tokenizer(config: DictConfig) -> Any:
    from transformers import AutoTokenizer

    path = config.data.tokenizer or config.actor_rollout_ref.model.path
    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=bool(config.data.get("trust_remote_code"))
        )
    except Exception as error:  # transformers gives many kinds for damaged files
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{path}: the run's tokenizer cannot be read ({text:.200}); copy its model here") from None


# ---- prompts


def _key(ids: Iterable[int]) -> bytes:
    return hashlib.blake2b(json.dumps([*ids]).encode(), digest_size=16).digest()


def _keys(run: Path, step: int) -> dict[int, bytes]:
    """{row of a recorded step: key of its prompt}."""
    tensors = _load(run / "rollouts" / f"step_{step}.safetensors", ("prompts", "attention_mask"))
    prompts, mask = tensors["prompts"], tensors["attention_mask"][:, : tensors["prompts"].shape[1]].bool()
    return {row: _key(ids[keep].tolist()) for row, (ids, keep) in enumerate(zip(prompts, mask, strict=True))}


def _prompts_of_data(config: DictConfig, tokenizer: Any, wanted: set[bytes]) -> dict[bytes, Row]:
    """{key: row of the run's data} of the wanted prompts; of rows with equal prompts the first."""
    from pyarrow import lib, parquet

    data, found = config.data, {}
    files = [data.train_files] if isinstance(data.train_files, str) else [*data.train_files]
    for file in files:
        try:
            table = parquet.ParquetFile(file)
            columns = [name for name in (data.prompt_key, *_OF_ROW) if name in table.schema_arrow.names]
            for batch in table.iter_batches(_BATCH, columns=columns):
                rows = batch.to_pylist()
                for row, key in zip(
                    rows, _keys_of_data([row[data.prompt_key] for row in rows], data, tokenizer), strict=True
                ):
                    if key in wanted:
                        found.setdefault(key, {**row, "prompt": row[data.prompt_key]})
        except (OSError, lib.ArrowException, LookupError, TypeError, ValueError) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"{file}: the run's data cannot be read ({text:.200}); put its files there again"
            ) from None
    if missing := len(wanted - found.keys()):
        raise ConfigError(
            f"{missing} of {len(wanted)} recorded prompts are not in the run's data ({', '.join(files)}); expected the "
            "files, tokenizer and chat template as they were when it ran"
        )
    return found


def _keys_of_data(prompts: list[Any], data: DictConfig, tokenizer: Any) -> Iterator[bytes]:
    """Keys of prompts as verl's dataset tokenizes and cuts them (verl/utils/dataset/rl_dataset.py)."""
    texts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in prompts]
    most = data.max_prompt_length
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        if len(ids) > most:
            half = most // 2
            cut = {"left": ids[-most:], "right": ids[:most], "middle": ids[:half] + ids[half - most :]}
            ids = cut.get(data.truncation, ids)
        yield _key(ids)


# ---- responses


def _load(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors of a recorded file. ConfigError for one that is damaged, or has them not."""
    from safetensors import SafetensorError, safe_open

    if missing := {*names} - safetensors_header(path).keys():
        raise ConfigError(f"{path}: holds no {' or '.join(sorted(missing))}; run it again")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); run it again") from None


def _groups(run: Path, step: int, end: int | None) -> Iterator[tuple[bytes, str, list[_Response]]]:
    """(key of the prompt, uid, responses) of each group of a step, in the order of their first rows."""
    tensors = _load(run / "rollouts" / f"step_{step}.safetensors", _RECORDED)
    given = _load(run / "rollouts" / f"scores_{step}.safetensors", _SCORED)
    responses, scores, uids = tensors["responses"], given["score"].tolist(), given["uid"]
    if len({len(responses), len(scores), len(uids)}) > 1:
        raise ConfigError(f"{run}, step {step}: {len(responses)} responses and {len(scores)} scores; run it again")
    lengths = tensors["attention_mask"][:, -responses.shape[1] :].sum(-1).tolist()
    keys = _keys(run, step)
    groups: dict[str, tuple[bytes, list[_Response]]] = {}
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        ids = responses[row, :length].tolist()
        _, group = groups.setdefault(bytes(uids[row].tolist()).hex(), (keys[row], []))
        group.append(_Response(score, ids, is_cut=not ids or ids[-1] != end))
    yield from ((key, uid, group) for uid, (key, group) in groups.items())


def _rows(
    run: Path,
    steps: list[int],
    choice: Choice,
    tokenizer: Any,
    found: dict[bytes, Row],
    report: dict[str, Any],
    left_out: Counter[str],
    progress: Callable[[int], Any],
) -> Iterator[Row]:
    """The rows of all steps; their counts to `report` and `left_out`."""
    seen: set[bytes] = set()
    for step in steps:
        for key, uid, group in _groups(run, step, tokenizer.eos_token_id):
            report["prompts"] += 1
            report["responses"] += len(group)
            responses = _distinct(group, choice, tokenizer, left_out)
            for columns, score in _chosen(responses, choice, left_out):
                digest = _key([*key, *json.dumps(columns).encode()])
                if digest in seen:
                    left_out["repeated"] += 1
                    continue
                seen.add(digest)
                yield _row(
                    found[key], columns, choice, score, f"{run.name}, step {step}, uid {uid}, reward {score:.6g}"
                )
        progress(1)


def _distinct(
    group: list[_Response], choice: Choice, tokenizer: Any, left_out: Counter[str]
) -> list[tuple[str, float]]:
    """(text, score) of a group's responses that can be trained on, the best first; of equal texts the first."""
    texts: dict[str, float] = {}
    for response in sorted(group, key=lambda each: -each.score if math.isfinite(each.score) else math.inf):
        text = tokenizer.decode(response.ids, skip_special_tokens=True)
        if not math.isfinite(response.score):
            left_out["without a finite reward"] += 1
        elif choice.finished and response.is_cut:
            left_out["cut at the length limit"] += 1
        elif not text:
            left_out["empty"] += 1
        elif text in texts:
            left_out["repeated"] += 1
        else:
            texts[text] = response.score
    return [*texts.items()]


def _chosen(
    responses: list[tuple[str, float]], choice: Choice, left_out: Counter[str]
) -> Iterator[tuple[dict[str, str], float]]:
    """({column: text}, reward) of the rows that a group gives; of a pair the difference of the rewards."""
    least = -math.inf if choice.threshold is None else choice.threshold - _SLACK
    if choice.kind == "pairs":
        if len(responses) > 1:
            (chosen, high), (rejected, low) = responses[0], responses[-1]
            if high < least:
                left_out["prompts below the threshold"] += 1
            elif high <= low or high - low < choice.margin - _SLACK:
                left_out["prompts within the margin"] += 1
            else:
                yield {"chosen": chosen, "rejected": rejected}, high - low
        else:
            left_out["prompts without two responses"] += 1
        return
    good = [(text, score) for text, score in responses if score >= least]
    most = choice.best if choice.kind == "best" else len(good)
    left_out.update({"below the threshold": len(responses) - len(good), "not among the best": len(good[most:])})
    for text, score in good[:most]:
        yield {"response": text}, score


def _row(data: Row, columns: dict[str, str], choice: Choice, score: float, origin: str) -> Row:
    messages = [{"role": one["role"], "content": one["content"]} for one in data["prompt"]]
    if choice.kind == "conditional":
        last = messages[-1]
        last["content"] = choice.template.replace("{reward}", f"{score:.2f}").replace("{input}", last["content"])
    answer = (data.get("reward_model") or {}).get("ground_truth")
    answer = "" if answer is None else str(answer)
    extra = {"index": -1, "split": "", "answer": answer, "solution": "", "origin": origin}
    source, ability = data.get("data_source") or "", data.get("ability") or ""
    return verl_row({"prompt": messages, **columns}, source, ability, answer, extra)
