"""The commands `generate`, `chat` and `eval`: the trained model in use (docs/use.md)."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_patches.boot.before_import import PRELUDE
from verl_patches.cli.output import Json, print_json, say, table
from verl_patches.cli.run import Overrides, Upstream, check_switches
from verl_patches.config.compose import output_root
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.evaluation.plots import save
from verl_patches.inference import rows, scores
from verl_patches.inference.model import Model, Sampling, find_model, restart_in_environment, validation_sampling
from verl_patches.launch.smoke import CONFIG_NAME
from verl_patches.rewards.parts import parts_of
from verl_patches.shared_files import write_whole
from verl_patches.upstream.checkouts import trees_of
from verl_patches.values import printable

MODEL_HELP = "A run (its newest checkpoint), a checkpoint, a HF folder or shards."
SHOWN_WRONG, SHOWN_CHARS = 5, 200
Given = Annotated[Path, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
Step = Annotated[int | None, typer.Option(help="The run's checkpoint of this step.")]
ConfigName = Annotated[str, typer.Option(help="A file of configs/, for weights of no run.")]
Key = Annotated[str, typer.Option(help="The column of prompts: messages, or text, which is taken as it is.")]
Seed = Annotated[int, typer.Option(help="Of sampling; prompt i has SEED + i * N.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Only the likeliest tokens that make up this probability.")]
TopK = Annotated[int, typer.Option(help="Only this many of the likeliest tokens; -1 is all.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of a response.")]


def generate_command(
    model: Given,
    input: Annotated[Path, typer.Argument(help="A .jsonl or .parquet file.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="A new .jsonl file, or one to go on with.", show_default=False)],
    overrides: Overrides = None,
    prompt_key: Key = "prompt",
    n: Annotated[int, typer.Option(help="Responses of each prompt.")] = 1,
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = -1,
    max_tokens: MaxTokens = 512,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Write tokens beside texts.")] = False,
    step: Step = None,
    config_name: ConfigName = CONFIG_NAME,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Write responses to the prompts of a file; the same command goes on where it was ended."""
    sampling = Sampling(n, seed, temperature, top_p, top_k, max_tokens).check()
    began, chosen = time.monotonic(), _start(model, config_name, overrides, upstream, step, newest=True)
    ((number, source),) = chosen.sources.items()
    with _stdout_kept():
        tokenizer = _prepared(source)
        prompts = rows.Prompts([input], prompt_key, tokenizer, chosen.longest - 1)
        settings = {
            "model": source.identity[:16],
            "prompts": prompts.digest,
            **asdict(sampling),
            "token_ids": token_ids,
        }
        with rows.resumable(output, settings) as lines:
            kept = lines.done
            outputs = _outputs(chosen, source, prompts, sampling, kept) if kept < prompts.count else ()
            for prompt, result in outputs:
                responses = [_response(each, token_ids) for each in result.outputs]
                lines.add({"row": prompt.number, "prompt": prompt.row[prompt_key], "responses": responses})
            tokens = sum(response["tokens"] for line in lines.read() for response in line["responses"])
    result = {"output": str(output), "model": str(source.folder), "step": number or None, "rows": prompts.count}
    result |= {"kept": kept, "responses": n * prompts.count, "tokens": tokens}
    result["seconds"] = round(time.monotonic() - began, 1)
    if as_json:
        print_json(result)
    else:
        from_before = f", {kept} of them from before" if kept else ""
        say(f"{output}: {prompts.count} rows{from_before}, {tokens} tokens, {result['seconds']} s")


def chat_command(
    model: Given,
    overrides: Overrides = None,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = -1,
    max_tokens: MaxTokens = 512,
    max_length: Annotated[int, typer.Option(help="Most tokens of a conversation, at most the model's length.")] = 8192,
    step: Step = None,
    config_name: ConfigName = CONFIG_NAME,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Talk to the model: a line of standard input is a message, /new begins again, the end of input ends it."""
    sampling = Sampling(1, seed, temperature, top_p, top_k, max_tokens).check()
    chosen = _start(model, config_name, overrides, upstream, step, newest=True)
    ((_, source),) = chosen.sources.items()
    longest = min(chosen.longest, max_length)
    if longest < 2:
        raise ConfigError(f"--max-length {max_length}: expected at least 2 tokens")
    first = [{"role": "system", "content": system}] if system else []
    with _stdout_kept():
        tokenizer = _prepared(source)
        try:
            template = rows.render(tokenizer, [*first, {"role": "user", "content": "MESSAGE"}])
        except ValueError as error:
            raise ConfigError(f"{source.folder}: {error}") from None
        engine = _engine_module().Engine(source, chosen.config, longest)
    if not as_json:
        say(f"template: {printable(template, keep=chr(10))}", "dim")
    said, turn = list(first), 0
    for message in _messages(as_json):
        if message == "/new":
            said, turn = list(first), 0
            continue
        said.append({"role": "user", "content": message})
        tokens = rows.prompt_tokens(tokenizer, {"prompt": said}, "prompt")
        if len(tokens) >= longest:
            say(f"the conversation has {len(tokens)} tokens, at most {longest - 1} fit; /new begins again", err=True)
            said.pop()
            continue
        shown = ""
        for output in engine.stream(tokens, sampling, turn):
            text = output.outputs[0].text
            if not as_json and not text.endswith("\ufffd"):
                typer.echo(printable(text[len(shown) :], keep="\n\t"), nl=False)
                shown = text
        if as_json:
            answer = {"message": message, "prompt_tokens": len(tokens), **_response(output.outputs[0], False)}
            typer.echo(json.dumps(answer))
        else:
            typer.echo(printable(text[len(shown) :], keep="\n\t"))
        said.append({"role": "assistant", "content": text})
        turn += 1


def _messages(as_json: bool) -> Iterator[str]:
    """Lines of standard input that are not empty; with a sign for a person at a terminal."""
    while True:
        if sys.stdin.isatty() and not as_json:
            typer.echo("> ", nl=False)
        line = sys.stdin.readline(rows.LONGEST_LINE)
        if not line:
            return
        if line.strip():
            yield line.strip()


def eval_command(
    model: Given,
    output: Annotated[Path, typer.Argument(help="A new folder, or an unfinished one.", show_default=False)],
    overrides: Overrides = None,
    data: Annotated[list[Path] | None, typer.Option(help="Files of data; default: data.val_files.")] = None,
    n: Annotated[int | None, typer.Option(help="Responses of each prompt; default: val_kwargs.n.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling; default: rollout.seed.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: as the run validates.")] = None,
    step: Step = None,
    config_name: ConfigName = CONFIG_NAME,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Accuracy by the training reward, of one model, or of every checkpoint of a run over its steps."""
    chosen = _start(model, config_name, overrides, upstream, step, newest=False)
    config, given = chosen.config, {"n": n, "seed": seed, "temperature": temperature}
    sampling = asdict(validation_sampling(config)) | {key: value for key, value in given.items() if value is not None}
    sampling, parts = Sampling(**sampling).check(), parts_of(config)
    files = data or [Path(file) for file in _listed(config.data.val_files)]
    source_key = config.data.reward_fn_key
    longest = min(config.data.max_prompt_length, chosen.longest - 1)
    with _stdout_kept():
        tokenizer = _prepared(*chosen.sources.values())
        columns = (source_key, "reward_model", "extra_info")
        prompts = rows.Prompts(
            files, config.data.prompt_key, tokenizer, longest, config.data.filter_overlong_prompts, columns,
            scores.require_answers(parts, source_key),
        )  # fmt: skip
        settings = {"models": [source.identity[:16] for source in chosen.sources.values()], "prompts": prompts.digest}
        settings |= {**asdict(sampling), "rewards": [asdict(part.entry) for part in parts]}
        with rows.resumable(output / "responses.jsonl", settings) as lines:
            _score_all(chosen, prompts, sampling, tokenizer, lines)
            report = _report(chosen, prompts, lines, output)
    if as_json:
        print_json(report)
    else:
        _show(report, output)


def _score_all(chosen: Model, prompts: rows.Prompts, sampling: Sampling, tokenizer: Any, lines: rows.Lines) -> None:
    """Write a line for each checkpoint and prompt that has none."""
    score, key = scores.scorer(chosen.config, tokenizer), chosen.config.data.reward_fn_key
    for place, (step, source) in enumerate(chosen.sources.items()):
        kept = lines.done - place * prompts.count
        if kept >= prompts.count:
            continue
        for prompt, result in _outputs(chosen, source, prompts, sampling, kept):
            row = {name: value for name, value in prompt.row.items() if name != prompts.key}
            try:
                found = score(row, [each.token_ids for each in result.outputs])
            except RecipeError as error:
                raise scores.failed_row(prompt.number, error) from error
            responses = [{**_response(o, False), **each} for o, each in zip(result.outputs, found, strict=True)]
            gold = (row.get("reward_model") or {}).get("ground_truth")
            line = {"step": step, "row": prompt.number, "data_source": row[key], "ground_truth": gold}
            lines.add({**line, "prompt": prompt.row[prompts.key], "responses": responses})


def _report(chosen: Model, prompts: rows.Prompts, lines: rows.Lines, output: Path) -> dict[str, Any]:
    """The measures, written to eval.json; wrong answers to wrong.jsonl; of several checkpoints a picture."""
    measured = {step: scores.measure(values) for step, values in scores.by_step(lines.read()).items()}
    wrong = [line for line in lines.read() if scores.is_wrong(line)]
    name = chosen.config.recipe.run if any(measured) else next(iter(chosen.sources.values())).folder.name
    report = {"model": name, "prompts": prompts.count, "left_out": prompts.skipped, "wrong": len(wrong)}
    report["steps"] = [
        {"step": step, "folder": str(chosen.sources[step].folder), **of} for step, of in measured.items()
    ]
    write_whole(output / "wrong.jsonl", "".join(json.dumps(line) + "\n" for line in wrong))
    if len(measured) > 1:
        save(scores.accuracy_figure(name, measured), output / "accuracy.png")
    write_whole(output / "eval.json", json.dumps(report, indent=1) + "\n")
    report["first_wrong"] = [line for line in wrong if line["step"] == max(measured)][:SHOWN_WRONG]
    return report


def _show(report: dict[str, Any], output: Path) -> None:
    several, passes = len(report["steps"]) > 1, {}
    for each in report["steps"]:
        for of in each["sources"].values():
            passes |= dict.fromkeys(of["pass"])
    cells = []
    for each in report["steps"]:
        for source, of in each["sources"].items():
            head = [str(each["step"])] if several else []
            mean = f"{of['mean']:.4f}", f"{of['low']:.4f} to {of['high']:.4f}"
            cells.append([*head, source, str(of["prompts"]), *mean, *(f"{of['pass'].get(k, 0):.4f}" for k in passes)])
    how = {of["interval"] for each in report["steps"] for of in each["sources"].values()}
    columns = [
        *(["step"] if several else []),
        "source",
        "prompts",
        f"mean@{of['n']}",
        "95 %",
        *(f"pass@{k}" for k in passes),
    ]
    table(f"{report['model']}: mean over sources {report['steps'][-1]['score']:.4f}", columns, cells)
    say(f"95 %: {'; '.join(sorted(how))}")
    if report["left_out"]:
        say(f"{report['left_out']} prompts longer than data.max_prompt_length were left out")
    for line in report["first_wrong"]:
        answer = next(each for each in line["responses"] if each["value"] < 1)
        texts = f"gold {line['ground_truth']!r:.{SHOWN_CHARS}}, found {answer['text']!r:.{SHOWN_CHARS}}"
        say(f"row {line['row']} ({line['data_source']}): value {answer['value']:.4g}, {texts}")
    say(
        f"{output}: eval.json, responses.jsonl, wrong.jsonl ({report['wrong']} prompts)"
        + (", accuracy.png" if several else "")
    )


def _listed(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given or [])


def _start(
    given: Path, config_name: str, overrides: list[str] | None, upstream: Path | None, step: int | None, newest: bool
) -> Model:
    """The model, in a process that has the environment of its configuration and the prelude's rows."""
    trees = trees_of(upstream)
    model = find_model(given, output_root(), config_name, overrides or [], trees, step)
    check_switches(model.config)
    restart_in_environment(model)
    if newest:
        number = max(model.sources)
        model = Model(model.config, model.trees, {number: model.sources[number]})
    importlib.import_module(PRELUDE)
    return model


def _prepared(*sources: Any) -> Any:
    """The tokenizer of the last of `sources`."""
    return rows.read_tokenizer(sources[-1].folder)


def _engine_module() -> Any:
    from verl_patches.inference import engine  # imports vllm

    return engine


def _outputs(
    chosen: Model, source: Any, prompts: rows.Prompts, sampling: Sampling, kept: int
) -> Iterable[tuple[rows.Prompt, Any]]:
    """(prompt, vLLM's output) of all prompts but the first `kept`, in order, with a progress bar on stderr."""
    from tqdm import tqdm

    engine = _engine_module().Engine(source, chosen.config, min(chosen.longest, prompts.longest + sampling.max_tokens))
    waiting: list[rows.Prompt] = []

    def left() -> Iterator[list[int]]:
        for place, prompt in enumerate(prompts):
            if place >= kept:
                waiting.append(prompt)
                yield prompt.tokens

    with tqdm(total=prompts.count, initial=kept, desc=source.folder.name, unit="row", mininterval=_INTERVAL_S()) as bar:
        for output in engine.run(left(), sampling, kept):
            yield waiting.pop(0), output
            bar.update()


def _INTERVAL_S() -> float:
    return 0.5 if sys.stderr.isatty() else 30.0


def _response(output: Any, token_ids: bool) -> dict[str, Any]:
    """One of vLLM's CompletionOutputs; finish: stop, or length."""
    made = {"text": output.text, "tokens": len(output.token_ids), "finish": output.finish_reason}
    return {**made, "token_ids": list(output.token_ids)} if token_ids else made


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """Inside, what libraries print on standard output, in C too, goes to standard error: --json stays JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
