"""Read the YAML of `data build`: MindSpeed-RL's keys of its preprocessing, and ours, which docs/data.md describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from verl_patches.errors import ConfigError
from verl_patches.recipe import choices
from verl_patches.shared_files import expand_home
from verl_patches.tools.data.handlers import EXTRA_INFO_KEYS, HANDLERS, MODEL_TEMPLATE, Handler, read_template
from verl_patches.values import Count, Seed, Share, Text, field_types, parse_yaml, read_yaml, unknown_key, value_faults

# {reason to leave out a record: share of the records above which nothing is written}; `sentences` leaves none out
REASON_LIMITS = {"bad": 0.0, "repeated": 1.0, "too_long": 1.0, "sentences": 0.1}
PathText = Annotated[Text, AfterValidator(expand_home)]


class Settings(BaseModel):
    """Hold all keys; those without a default are required."""

    model_config = ConfigDict(frozen=True)
    input: PathText | Annotated[list[PathText], Field(min_length=1)]
    handler_name: Annotated[str, choices(*HANDLERS)]
    output_prefix: PathText
    tokenizer_type: Literal["HuggingFaceTokenizer", "PretrainedFromHF"] = "HuggingFaceTokenizer"
    tokenizer_name_or_path: PathText | None = None
    trust_remote_code: bool = False
    seq_length: Count | None = None
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    log_interval: Count = 1000
    prompt_type: Text = MODEL_TEMPLATE
    map_keys: dict[str, str] = {}
    dataset_additional_keys: list[Text] = []
    input_split: Text = "train"
    data_source: Text | None = None
    dedupe: bool = True
    shuffle: bool = True
    seed: Seed = 0
    test_size: Annotated[float, Field(gt=0, lt=1)] | Count = 0.1
    refuse_above: dict[Annotated[str, choices(*REASON_LIMITS)], Share] = {}

    @property
    def inputs(self) -> list[str]:
        """Return `input` as a list."""
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def tokenizer_choice(self) -> tuple[str, str | None, bool]:
        """Return (prompt_type, tokenizer_name_or_path, trust_remote_code)."""
        return self.prompt_type, self.tokenizer_name_or_path, self.trust_remote_code

    @property
    def handler(self) -> Handler:
        """Return the handler, which reads its fields from the columns of map_keys."""
        handler = HANDLERS[self.handler_name]
        mapped = {field: (column,) if column else () for field, column in self.map_keys.items()}
        if "messages" in handler.fields and {"prompt", "response"} & mapped.keys():
            mapped.setdefault("messages", ())  # messages would take precedence over them
        return replace(handler, fields={**handler.fields, **mapped})


def read_settings(file: Path, overrides: Iterable[str] = (), output: Path | None = None) -> Settings:
    """Return the settings of a file, of texts KEY=VALUE, and of `output` (an output_prefix); ConfigError for faults."""
    values = read_yaml(file)
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise ConfigError(f"{override}: expected KEY=VALUE")
        values[key] = text if key == "prompt_type" else next(iter(parse_yaml(text, key)), None)
    if output is not None:
        values["output_prefix"] = str(output)
    types, hint = {key: field_types(Settings)[key] for key in Settings.model_fields}, "docs/data.md lists the keys"
    faults = [unknown_key(str(key), types, hint) for key in values if key not in types]
    faults += [f"{key} is missing" for key in ("input", "handler_name", "output_prefix") if key not in values]
    if faults := faults + value_faults(types, values):
        raise ConfigError(f"{file}: {'; '.join(faults)}")
    settings = Settings(**values)
    if faults := list(_faults(settings)):
        raise ConfigError(f"{file}: {'; '.join(faults)}")
    read_template(settings.prompt_type)
    return settings


def _faults(settings: Settings) -> Iterator[str]:
    """Yield the faults of values that are valid one by one."""
    name, additional = settings.handler_name, settings.dataset_additional_keys
    fields = HANDLERS[name].fields
    hint = f"handler {name} has the fields {', '.join(fields)}"
    yield from (f"map_keys: {unknown_key(key, fields, hint)}" for key in settings.map_keys if key not in fields)
    if taken := {*additional} & {*EXTRA_INFO_KEYS}:
        yield f"dataset_additional_keys: extra_info already has {' and '.join(sorted(taken))}; remove them"
    if settings.seq_length and not settings.tokenizer_name_or_path:
        yield "seq_length counts tokens: expected tokenizer_name_or_path too, found none"
    if name == "text" and settings.prompt_type != MODEL_TEMPLATE:
        yield "prompt_type: handler text makes rows without a prompt; remove prompt_type"
    if "://" in settings.output_prefix:
        yield f"output_prefix is {settings.output_prefix}; expected a local folder; write there and copy the result"
