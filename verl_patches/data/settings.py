"""The YAML of `data build`: MindSpeed-RL's keys of its preprocessing, and ours. docs/data.md says what each does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from verl_patches.data.handlers import EXTRA, HANDLERS, MINDSPEED, Handler
from verl_patches.data.templates import template_of
from verl_patches.errors import ConfigError
from verl_patches.values import Count, Positive, Seed, Share, Text, types_of, unknown_key, value_faults
from verl_patches.yaml_files import parse_yaml, read_yaml

REASONS = ("bad", "repeated", "too_long")  # why a record is left out
_INSTEAD = {  # keys of MindSpeed-RL and MindSpeed-LLM that do not apply
    "cache_dir": "nothing is cached outside the output: leave it out",
    "overwrite_cache": "nothing is cached: leave it out, or give --overwrite to replace the output",
    "hf_datasets_params": "write the dataset's id as input, and its split as input_split",
    "json_keys": "write map_keys: {text: COLUMN}",
    "prompt_type_path": "write the Jinja text as prompt_type",
    "append_eod": "a run adds the end token: leave it out",
    "pack": "a run packs its batches (recipe.train.use_remove_padding): leave it out",
    "neat_pack": "a run packs its batches (recipe.train.use_remove_padding): leave it out",
    "pad_to_multiple_of": "rows are not padded: leave it out",
    "make_vocab_size_divisible_by": "the model's config says it: leave it out",
    "vocab_file": "write the model's folder as tokenizer_name_or_path",
    "merge_file": "write the model's folder as tokenizer_name_or_path",
    "tokenizer_not_use_fast": "the fast tokenizer is used where there is one: leave it out",
    "streaming": "input is always read in pieces: leave it out",
    "n_subs": "input is always read in pieces: leave it out",
    "dataset_impl": "the output is parquet: leave it out",
    "merge_group_keys": "write all files as a list of input",
    "enable_thinking": "write prompt_type: think",
    "max_samples": "cut the input, or use data.train_max_samples of a run",
}


class Settings(BaseModel):
    """All keys. `handler_name` is one of HANDLERS here, also where the file has MindSpeed-RL's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    input: Text | list[Text]
    handler_name: Text
    output_prefix: Text
    tokenizer_type: Literal["HuggingFaceTokenizer", "PretrainedFromHF"] = "HuggingFaceTokenizer"
    tokenizer_name_or_path: Text | None = None
    seq_length: Count | None = None
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    log_interval: Count = 1000
    prompt_type: Text = "model"
    map_keys: dict[str, str] = {}
    dataset_additional_keys: list[Text] = []
    input_split: Text = "train"
    data_source: Text | None = None
    dedupe: bool = True
    shuffle: bool = True
    seed: Seed = 0
    test_size: Positive = 0.1
    refuse_above: dict[Literal["bad", "repeated", "too_long"], Share] = {}

    @property
    def inputs(self) -> list[str]:
        """`input` as a list."""
        return [self.input] if isinstance(self.input, str) else list(self.input)

    @property
    def handler(self) -> Handler:
        """The handler, its fields read from the columns of map_keys."""
        handler = HANDLERS[self.handler_name]
        mapped = {field: (column,) if column else () for field, column in self.map_keys.items()}
        return Handler(handler.read, {**handler.fields, **mapped}, handler.columns, handler.ability, handler.used_by)


def read_settings(file: Path, overrides: Iterable[str] = ()) -> Settings:
    """The settings of a file and of KEY=VALUE texts. ConfigError, one sentence, for whatever is wrong."""
    values = read_yaml(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected keys and values, as in docs/data.md")
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise ConfigError(f"{override}: expected KEY=VALUE")
        values[key] = next(iter(parse_yaml(text, key)), None)
    for key in values:
        if key in _INSTEAD:
            raise ConfigError(f"{file}: {key} does not apply here: {_INSTEAD[key]}")
    known, hint = Settings.model_fields, "the keys are those of docs/data.md"
    faults = [unknown_key(str(key), known, hint) for key in values if key not in known]
    faults += [f"{key} is missing" for key, field in known.items() if field.is_required() and key not in values]
    faults += value_faults({key: kind for key, kind in types_of(Settings).items() if key in known}, values)
    if not faults:
        values["handler_name"] = MINDSPEED.get(values["handler_name"], values["handler_name"])
        faults = list(_faults(values, settings := Settings(**values)))
    if faults:
        raise ConfigError(f"{file}: {'; '.join(faults)}")
    template_of(settings.prompt_type)
    return settings


def _faults(values: dict[str, Any], settings: Settings) -> Iterable[str]:
    """What is wrong with values that are right by themselves."""
    if (name := settings.handler_name) not in HANDLERS:
        hint = f"expected {', '.join(HANDLERS)}"
        yield f"handler_name is {name}; {unknown_key(name, HANDLERS, hint).partition('; ')[2]}"
        return
    fields = HANDLERS[name].fields
    hint = f"{name} has {', '.join(fields)}"
    yield from (f"map_keys: {unknown_key(key, fields, hint)}" for key in settings.map_keys if key not in fields)
    if taken := set(settings.dataset_additional_keys) & {*EXTRA}:
        yield f"dataset_additional_keys: extra_info has keys of its own named {', '.join(sorted(taken))}; leave them out"
    if "labels" in settings.dataset_additional_keys and name in ("maths", "gsm8k"):
        yield "dataset_additional_keys: labels is the answer, which is reward_model.ground_truth here; leave it out"
    if settings.seq_length and not settings.tokenizer_name_or_path:
        yield "seq_length is in tokens; expected tokenizer_name_or_path too"
    if settings.test_size >= 1 and settings.test_size != int(settings.test_size):
        yield f"test_size is {settings.test_size}; expected a share below 1 or a whole number of rows"
    if "text" in fields and settings.prompt_type != "model":
        yield "prompt_type: raw text has no prompt; leave it out"
    if "://" in settings.output_prefix:
        yield f"output_prefix is {settings.output_prefix}; expected a local folder: copy it from there"
