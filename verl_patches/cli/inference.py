"""Define the commands `generate`, `chat` and `eval`, which use the trained model (docs/use.md)."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_patches.catalog import platform_rows
from verl_patches.cli.output import Json, print_json, print_table, print_text
from verl_patches.cli.run import Overrides, Upstream, check_switches
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.launch.smoke import CONFIG_NAME
from verl_patches.patching.boot.before_import import PRELUDE
from verl_patches.run.compose import output_root
from verl_patches.shared_files import replacing, write_whole
from verl_patches.step.rows import render_chat
from verl_patches.tools.data.sources import prompt_tokens, read_tokenizer
from verl_patches.tools.inference import scores
from verl_patches.tools.inference.model import (
    Model,
    Prompt,
    answers,
    find_model,
    read_prompts,
    response_fields,
    restart_in_environment,
    validation_sampling,
)
from verl_patches.upstream.checkouts import find_trees
from verl_patches.values import printable

CONVERSATION_TOKENS = 8192  # most tokens of a conversation, where the model takes more
ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="A run, checkpoint, HF folder or Megatron folder.")]
ConfigName = Annotated[str | None, typer.Option(help=f"For weights of no run: a file of configs/ ({CONFIG_NAME}).")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 decodes greedily.")]
TopP = Annotated[float, typer.Option(help="Sample only from the likeliest tokens with this total probability.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of a response.")]


def generate_command(
    model: ModelPath,
    input: Annotated[Path, typer.Argument(help="Prompts: a .json, .jsonl or .parquet file.")],
    output: Annotated[Path, typer.Argument(help="A new .jsonl file.")],
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
    (source,), key = chosen.sources.values(), chosen.run.verl.data.prompt_key
    sampling = {"n": n, "seed": seed, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    with _stdout_to_stderr():
        _require_new(output)
        tokenizer = read_tokenizer(source.folder, chosen.run.recipe.trust_remote_code)
        prompts, _ = read_prompts([input], key, tokenizer, chosen.length - 1)
        lines = []
        for prompt, responses in answers(chosen, source, prompts, sampling):
            made = [response_fields(each, tokenizer) for each in responses]
            lines.append({"row": prompt.number, "prompt": prompt.row[key], "responses": made})
        _write_lines(output, lines)
    if as_json:
        print_json({"output": str(output), "model": str(source.folder), "rows": len(prompts)})
    else:
        print_text(f"{output}: {len(prompts)} rows")


def chat_command(
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
    tokenizer = read_tokenizer(source.folder, chosen.run.recipe.trust_remote_code)
    try:
        template = render_chat(tokenizer, [{"role": "user", "content": "MESSAGE"}])
    except (ValueError, RecipeError) as error:
        raise ConfigError(f"{source.folder}: {error}") from None
    interactive, history = not as_json and sys.stdin.isatty(), list[dict[str, str]]()
    with _stdout_to_stderr() as show:
        from verl_patches.tools.inference import engine as engines  # imports vllm

        sampling = {"seed": seed, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        (params,) = engines.prompt_params(sampling, 1)
        with engines.start_engine(source.folder, chosen.run, length) as generate:
            show("" if as_json else f"template: {template}\n")
            while show("> " if interactive else "") or (line := sys.stdin.readline()):
                message = line.strip()
                if message in ("", "/new"):
                    history = [] if message else history
                    continue
                try:
                    tokens = prompt_tokens(tokenizer, [*history, {"role": "user", "content": message}])
                    if len(tokens) >= length:
                        found = f"found {len(tokens)}; /new starts again"
                        raise ValueError(f"expected at most {length - 1} tokens in all, {found}")
                except ValueError as error:
                    print_text(str(error), err=True)
                    continue
                ((response,),) = generate([tokens], [params])
                answer = response_fields(response, tokenizer)
                fields = {"message": message, "prompt_tokens": len(tokens), **answer}
                show((json.dumps(fields) if as_json else printable(answer["text"], keep="\n\t")) + "\n")
                history += [{"role": "user", "content": message}, {"role": "assistant", "content": answer["text"]}]


def eval_command(
    model: ModelPath,
    output: Annotated[Path, typer.Argument(help="A new folder.")],
    overrides: Overrides = None,
    config_name: ConfigName = None,
    upstream: Upstream = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model, or all checkpoints of a run, on data.val_files with the training reward, as validation does."""
    chosen = _prepare_model(model, config_name, overrides, upstream)
    run, sources = chosen.run, chosen.sources
    data, newest = run.verl.data, sources[max(sources)].folder
    names = [data.val_files] if isinstance(data.val_files, str) else data.val_files or []
    most = min(data.max_prompt_length, chosen.length - 1)
    without = scores.unused_models(run)
    with _stdout_to_stderr():
        _require_new(output)
        tokenizer = read_tokenizer(newest, run.recipe.trust_remote_code)
        files, skip = [Path(name) for name in names], data.filter_overlong_prompts
        prompts, left_out = read_prompts(files, data.prompt_key, tokenizer, most, skip)
        report: dict[str, Any] = {"model": str(newest), "left_out": left_out, "without": without, "steps": []}
        lines = []
        for step, step_lines in _scored_lines(chosen, prompts, tokenizer):
            report["steps"].append(scores.checkpoint_score(step, step_lines))
            lines += step_lines
        _write_lines(output / "responses.jsonl", lines)
        write_whole(output / "eval.json", json.dumps(report, indent=1) + "\n")
    if as_json:
        print_json(report)
    else:
        _print_scores(report, output)


def _scored_lines(chosen: Model, prompts: list[Prompt], tokenizer: Any) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (step, a line for each prompt with its scored responses) of each checkpoint."""
    data, sampling = chosen.run.verl.data, validation_sampling(chosen.run)
    score = scores.scorer(chosen.run, tokenizer, prompts[0].row)
    for step, source in chosen.sources.items():
        lines = []
        for prompt, responses in answers(chosen, source, prompts, sampling):
            values = score(prompt.row, [each.tokens for each in responses])
            made = [{**response_fields(r, tokenizer), **value} for r, value in zip(responses, values, strict=True)]
            line = {"step": step, "row": prompt.number, "data_source": str(prompt.row.get(data.reward_fn_key))}
            line["ground_truth"] = (prompt.row.get("reward_model") or {}).get("ground_truth")
            lines.append({**line, "prompt": prompt.row[data.prompt_key], "responses": made})
        yield step, lines


def _print_scores(report: dict[str, Any], output: Path) -> None:
    """Print a row for each checkpoint and source."""
    cells = []
    for step in report["steps"]:
        for source, of in step["sources"].items():
            passes = ", ".join(f"{k}: {value:.4f}" for k, value in of["pass"].items())
            interval = f"{of['low']:.4f} to {of['high']:.4f}"
            cells.append([str(step["step"]), source, str(of["prompts"]), f"{of['mean']:.4f}", interval, passes])
    columns = ["step", "source", "prompts", f"mean@{of['n']}", "95 % interval", "pass@k"]
    print_table(f"{report['model']}: score {step['score']:.4f}, the mean over sources", columns, cells)
    more = f"{report['left_out']} prompts were too long; rewards left out: {', '.join(report['without']) or 'none'}"
    print_text(f"{output}: eval.json, responses.jsonl; {more}")


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


def _require_new(output: Path) -> None:
    if output.exists():
        raise ConfigError(f"{output}: expected a new path, found an existing one; give another, or remove it")


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines; dates and decimals of parquet become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new, new.open("w") as file:
        file.writelines(json.dumps(line, default=str) + "\n" for line in lines)


@contextmanager
def _stdout_to_stderr() -> Iterator[Any]:
    """Redirect what libraries print on standard output, in C too, to standard error; yield what prints there still."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        try:
            with redirect_stdout(sys.stderr):  # vLLM keeps the stream that it finds when it is imported
                yield lambda text: print(text, end="", file=stdout, flush=True)
        finally:
            sys.stdout.flush()
            os.dup2(stdout.fileno(), 1)
