"""Define the commands `generate`, `chat` and `eval`, which use the trained model (docs/use.md)."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_patches.catalog import platform_rows
from verl_patches.cli.output import Json, print_json, print_table, print_text, progress_bar
from verl_patches.cli.run import Overrides, Upstream, check_switches
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.launch.smoke import CONFIG_NAME
from verl_patches.patching.boot.before_import import PRELUDE
from verl_patches.run.compose import output_root
from verl_patches.run.record.plots import save_figure
from verl_patches.shared_files import write_whole
from verl_patches.spec import RunSpec
from verl_patches.step.rows import render_chat
from verl_patches.tools.data.sources import prompt_tokens, read_tokenizer
from verl_patches.tools.inference import rows, scores
from verl_patches.tools.inference.model import Model, find_model, restart_in_environment, validation_sampling
from verl_patches.upstream.checkouts import find_trees
from verl_patches.values import printable

CONVERSATION_TOKENS = 8192  # most tokens of a conversation, where the model takes more
SHOWN_WRONG_ANSWERS = 5
ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="A run, checkpoint, HF folder or Megatron folder.")]
ConfigName = Annotated[str | None, typer.Option(help=f"For weights of no run: a file of configs/ ({CONFIG_NAME}).")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 decodes greedily.")]
TopP = Annotated[float, typer.Option(help="Sample only from the likeliest tokens with this total probability.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of a response.")]


def generate_command(
    model: ModelPath,
    input: Annotated[Path, typer.Argument(help="Prompts: a .json, .jsonl or .parquet file.")],
    output: Annotated[Path, typer.Argument(help="A new .jsonl file; the same command continues an interrupted one.")],
    overrides: Overrides = None,
    n: Annotated[int, typer.Option(help="Responses of each prompt.")] = 1,
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 512,
    config_name: ConfigName = None,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Generate responses to the prompts of a file with a model, or with the newest checkpoint of a run."""
    chosen = _prepare_model(model, config_name, overrides, upstream, newest=True)
    (source,) = chosen.sources.values()
    sampling = {"n": n, "seed": seed, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    with _stdout_to_stderr():
        tokenizer = read_tokenizer(source.folder, chosen.run.recipe.trust_remote_code)
        key = chosen.run.verl.data.prompt_key
        prompts, _ = rows.read_prompts([input], key, tokenizer, chosen.length - 1)
        with rows.resumable_output(output, _settings(chosen, prompts, sampling)) as lines:
            done = lines.count
            for _, prompt, completions in _outputs(chosen, prompts, sampling, done):
                responses = [_response(each, tokenizer) for each in completions]
                lines.add({"row": prompt.number, "prompt": prompt.row[key], "responses": responses})
    if as_json:
        print_json({"output": str(output), "model": str(source.folder), "rows": len(prompts), "kept": done})
    else:
        print_text(f"{output}: {len(prompts)} rows, {done} of them from an earlier call")


def chat_command(
    context: typer.Context,
    model: ModelPath,
    overrides: Overrides = None,
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 512,
    config_name: ConfigName = None,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Chat with a model: each line of standard input is a message; /new starts a new conversation."""
    chosen = _prepare_model(model, config_name, overrides, upstream, newest=True)
    (source,), length = chosen.sources.values(), min(chosen.length, CONVERSATION_TOKENS)
    sampling = {"seed": seed, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    with _stdout_to_stderr():
        tokenizer = read_tokenizer(source.folder, chosen.run.recipe.trust_remote_code)
        try:
            template = render_chat(tokenizer, [{"role": "user", "content": "MESSAGE"}])
        except (ValueError, RecipeError) as error:
            raise ConfigError(f"{source.folder}: {error}") from None
        from verl_patches.tools.inference import engine as engines  # imports vllm

        params = engines.sampling_params(sampling)
        engine = context.with_resource(_engine(chosen.run, source.folder, length))
    if not as_json:
        print_text(f"template: {template}", "dim")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    interactive, history = not as_json and sys.stdin.isatty(), list[dict[str, str]]()
    while True:
        typer.echo("> " if interactive else "", nl=False)
        if not (line := sys.stdin.readline()):
            return
        message = line.strip()
        if message == "/new":
            history = []
        if message in ("", "/new"):
            continue
        try:
            tokens = prompt_tokens(tokenizer, [*history, {"role": "user", "content": message}])
            if len(tokens) >= length:
                raise ValueError(f"expected at most {length - 1} tokens in all, found {len(tokens)}; /new starts again")
        except ValueError as error:
            print_text(str(error), err=True)
            continue
        shown = ""
        for output in engine.stream(tokens, params, len(history)):
            (completion,) = output.outputs
            if not as_json and (output.finished or not completion.text.endswith("\ufffd")):  # not half a character
                typer.echo(printable(completion.text[len(shown) :], keep="\n\t"), nl=output.finished)
                shown = completion.text
        if as_json:
            answer = {"message": message, "prompt_tokens": len(tokens), **_response(completion, tokenizer)}
            typer.echo(json.dumps(answer))
        history += [{"role": "user", "content": message}, {"role": "assistant", "content": completion.text}]


def eval_command(
    model: ModelPath,
    output: Annotated[Path, typer.Argument(help="A folder; the same command continues an interrupted one.")],
    overrides: Overrides = None,
    config_name: ConfigName = None,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model, or all checkpoints of a run, on data.val_files with the training reward, as validation does."""
    chosen = _prepare_model(model, config_name, overrides, upstream)
    run, sampling = chosen.run, validation_sampling(chosen.run)
    data, sources = run.verl.data, list(chosen.sources.values())
    names = [data.val_files] if isinstance(data.val_files, str) else data.val_files or []
    files = [Path(name) for name in names]
    most = min(data.max_prompt_length, chosen.length - 1)
    columns = data.reward_fn_key, "reward_model", "extra_info"
    rewards, models = scores.reward_facts(run)
    with _stdout_to_stderr():
        tokenizer = read_tokenizer(sources[-1].folder, run.recipe.trust_remote_code)
        overlong = data.filter_overlong_prompts
        prompts, left_out = rows.read_prompts(files, data.prompt_key, tokenizer, most, overlong, columns)
        with rows.resumable_output(output / "responses.jsonl", _settings(chosen, prompts, sampling, rewards)) as lines:
            _write_scores(chosen, prompts, sampling, tokenizer, lines)
            report: dict[str, Any] = {"model": str(sources[-1].folder), "left_out": left_out, "without": models}
            report["steps"] = scores.checkpoint_scores(lines.read())
            if len(report["steps"]) > 1:
                save_figure(scores.accuracy_figure(run.home.name, report["steps"]), output / "accuracy.png")
            write_whole(output / "eval.json", json.dumps(report, indent=1) + "\n")
    if as_json:
        print_json(report)
    else:
        _print_scores(report, output)


def _write_scores(
    chosen: Model, prompts: list[rows.Prompt], sampling: dict[str, Any], tokenizer: Any, lines: rows.Lines
) -> None:
    """Write a line for each checkpoint and prompt that has none yet."""
    score, data = scores.scorer(chosen.run, tokenizer, prompts[0].row), chosen.run.verl.data
    for step, prompt, completions in _outputs(chosen, prompts, sampling, lines.count):
        scored = score(prompt.row, [each.token_ids for each in completions])
        source = prompt.row.get(data.reward_fn_key)
        line = {"step": step, "row": prompt.number, "data_source": "unknown" if source is None else str(source)}
        line["ground_truth"] = (prompt.row.get("reward_model") or {}).get("ground_truth")
        responses = [{**_response(each, tokenizer), **values} for each, values in zip(completions, scored, strict=True)]
        lines.add({**line, "prompt": prompt.row[data.prompt_key], "responses": responses})


def _print_scores(report: dict[str, Any], output: Path) -> None:
    """Print a row for each checkpoint and source, how intervals were made, and the newest's first wrong answers."""
    measured = [(each["step"], source, of) for each in report["steps"] for source, of in each["sources"].items()]
    cells = []
    for step, source, of in measured:
        passes = ", ".join(f"{k}: {value:.4f}" for k, value in of["pass"].items())
        interval = f"{of['low']:.4f} to {of['high']:.4f} ({of['interval']})"
        cells.append([str(step), source, str(of["prompts"]), f"{of['mean']:.4f}", interval, passes])
    columns = ["step", "source", "prompts", f"mean@{of['n']}", "95 % interval", "pass@k"]
    print_table(f"{report['model']}: score {report['steps'][-1]['score']:.4f}, the mean over sources", columns, cells)
    wrong = report["steps"][-1]["wrong"]
    for each in wrong[:SHOWN_WRONG_ANSWERS]:
        print_text(f"wrong: row {each['row']}, expected {each['expected']!r:.200}, found {each['found']!r}")
    more = f"{report['left_out']} prompts were too long; rewards left out: {', '.join(report['without']) or 'none'}"
    print_text(f"{output}: eval.json has all {len(wrong)} wrong answers; {more}")


def _prepare_model(
    path: Path, config_name: str | None, overrides: list[str] | None, upstream: Path | None, newest: bool = False
) -> Model:
    """Return the model, in a process with the environment of its configuration and the rows of the catalogue."""
    trees = find_trees(upstream)
    model = find_model(path, output_root(), config_name, overrides or [], trees, platform_rows, newest)
    check_switches(model.run)
    restart_in_environment(model.run)
    print_text(f"settings: {model.settings}", err=True)
    importlib.import_module(PRELUDE)
    return model


def _settings(
    chosen: Model, prompts: list[rows.Prompt], sampling: dict[str, Any], rewards: Any = None
) -> dict[str, Any]:
    """Return the settings that a call must share with the one whose output it continues."""
    models = [source.identity for source in chosen.sources.values()]
    dtype = chosen.run.verl.actor_rollout_ref.rollout.dtype
    return {"models": models, "dtype": dtype, "prompts": prompts, "rewards": rewards, **sampling}


def _outputs(
    chosen: Model, prompts: list[rows.Prompt], sampling: dict[str, Any], done: int
) -> Iterator[tuple[int, rows.Prompt, Any]]:
    """Yield (step, prompt, vLLM's responses) of each checkpoint and prompt after the first `done`."""
    from verl_patches.tools.inference import engine as engines  # imports vllm

    params = engines.sampling_params({**sampling, "detokenize": False})
    tokens = [prompt.tokens for prompt in prompts]
    length = min(chosen.length, max(map(len, tokens)) + params.max_tokens)
    with progress_bar("responses", len(prompts) * len(chosen.sources), "row") as advance:
        advance(done)
        for number, (step, source) in enumerate(chosen.sources.items()):
            first = max(0, done - number * len(prompts))
            if first < len(prompts):
                with _engine(chosen.run, source.folder, length) as engine:
                    outputs = engine.run(tokens, params, first)
                    for prompt, output in zip(prompts[first:], outputs, strict=True):
                        yield step, prompt, output.outputs
                        advance(1)
                    del engine, outputs, output  # frees it before the next engine is made


def _engine(run: RunSpec, folder: Path, length: int) -> AbstractContextManager[Any]:
    """Return the engine of a one-rank configuration in this process, or else the engines of its ranks on Ray."""
    if run.platform != "npu" and run.world_size == 1:
        from verl_patches.tools.inference.engine import Engine

        return nullcontext(Engine(folder, run, length))
    from verl_patches.tools.inference.ranks import start_ranked_engine

    return start_ranked_engine(folder, run, length)


def _response(completion: Any, tokenizer: Any) -> dict[str, Any]:
    """Return one of vLLM's CompletionOutputs, its text decoded anew: vLLM's leaves out an incomplete last character.

    finish: stop or length.
    """
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    return {"text": text, "tokens": len(completion.token_ids), "finish": completion.finish_reason}


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect what libraries print on standard output, in C too, to standard error."""
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):  # vLLM keeps the stream that it finds when it is imported
            yield
    finally:
        sys.stdout.flush()
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)
