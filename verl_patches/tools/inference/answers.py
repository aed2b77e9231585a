"""Read prompts from files, and yield a model's answers to them, for `generate` and `eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.tools.data.sources import prompt_tokens, read_rows
from verl_patches.tools.inference.model import Model
from verl_patches.weights.source import Source


class Prompt(NamedTuple):
    """Hold a row, its number in all files from 0, and its prompt as tokens."""

    number: int
    row: dict[str, Any]
    tokens: list[int]


def read_prompts(
    files: Sequence[Path], key: str, tokenizer: Any, most: int, skip: bool = False
) -> tuple[list[Prompt], int]:
    """Return (the prompts of JSON and parquet files in order, how many were left out).

    key: the column of prompts: messages for the tokenizer's chat template, or literal text. most: tokens of a
    prompt; longer ones are refused, or left out with `skip`, as verl does with data.filter_overlong_prompts. Raise
    ConfigError, with file and row, for a row that cannot be used.
    """
    prompts, left_out = list[Prompt](), 0
    for file in files:
        for line, row in read_rows(file):
            try:
                if not isinstance(row, dict):
                    raise ValueError(f"expected a JSON object, found {str(row):.200}")
                tokens = prompt_tokens(tokenizer, row.get(key))
                if len(tokens) > most and not skip:
                    raise ValueError(f"expected a prompt of at most {most} tokens, found {len(tokens)}")
            except ValueError as error:
                raise ConfigError(f"{file}:{line}: column {key}: {error}") from None
            if len(tokens) > most:
                left_out += 1
            else:
                prompts.append(Prompt(len(prompts) + left_out, row, tokens))
    if not prompts:
        raise ConfigError(f"{', '.join(map(str, files)) or 'no file'}: expected rows with a prompt, found none")
    return prompts, left_out


def answers(
    model: Model, source: Source, prompts: Sequence[Prompt], sampling: Mapping[str, Any]
) -> Iterator[tuple[Prompt, list[Any]]]:
    """Yield each prompt with the engine's responses to it, of the weights of `source`; frees the engine before."""
    from verl_patches.tools.inference import engine as engines  # imports vllm

    params = engines.prompt_params(sampling, len(prompts))
    tokens = [prompt.tokens for prompt in prompts]
    length = min(model.length, max(map(len, tokens)) + sampling["max_tokens"])
    with engines.start_engine(source.folder, model.run, length) as generate:
        responses = generate(tokens, params)
    del generate  # which holds the engine
    yield from zip(prompts, responses, strict=True)


def response_fields(response: Any, tokenizer: Any) -> dict[str, Any]:
    """Return a response for JSON; finish: stop or length."""
    text = tokenizer.decode(response.tokens, skip_special_tokens=True)
    return {"text": text, "tokens": len(response.tokens), "finish": response.finish}
