"""verl's configuration and `recipe:` to Megatron and MindSpeed(-LLM) arguments, explained key by key (line a3).

Every key under the sections that are the training engine's is in TABLE (engine_table.py): mapped to arguments, verl's
own, or refused with a reason. A key that TABLE does not know is refused too, so that none is dropped. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_patches.model.mindspeed.arguments import Setting, model_settings
from verl_patches.training.engine_table import FIXED, SECTIONS, TABLE, Get, Key, Refusal, number


def explain(config: Any, hf_config: Mapping[str, Any] | None = None) -> list[Setting]:
    """Every engine key of a composed configuration, in TABLE's order, with the arguments it becomes; nothing is raised.

    `config`: the whole configuration or its `actor_rollout_ref`. With `hf_config` (config.json as a mapping) the
    model's rows too. `model.mindspeed.arguments.arguments_of` turns the rows into a command line, or refuses.
    """
    section = _plain(config)
    if "actor_rollout_ref" in section:
        section = {**section["actor_rollout_ref"], "recipe": section["recipe"]}
    given = dict(_leaves(section))
    defaults = {row.key: row.default for row in TABLE}

    def get(key: str) -> Any:
        value = given.get(key)
        return defaults.get(key) if value is None else value

    known = {row.key for row in TABLE}
    rows = [_explain(row, get) for row in TABLE]
    rows += [Setting(key, value, "refused", (), "no row of training/engine_table.py says what it becomes")
             for key, value in given.items() if key.startswith(tuple(f"{s}." for s in SECTIONS)) and key not in known]
    rows += [Setting("always", None, "fixed", arguments, why) for arguments, why in FIXED]
    return rows + (model_settings(hf_config) if hf_config is not None else [])


def _explain(row: Key, get: Get) -> Setting:
    value = get(row.key)
    if row.how == "with":
        return Setting(row.key, value, f"with {row.to}", (), row.why)
    if row.how == "verl":
        return Setting(row.key, value, "verl's own", (), row.why)
    if row.how == "ours":
        return Setting(row.key, value, "our own", (), row.why)
    if row.how == "same":
        actors = get(row.to)
        equal = number(value) in (None, number(actors))
        why = row.why if equal else f"must equal {row.to}, {actors!r}: {row.why}"
        return Setting(row.key, value, f"with {row.to}" if equal else "refused", (), why)
    if row.how == "only":
        fits = value in row.to
        return Setting(row.key, value, "mapped" if fits else "refused", (),
                       f"as it must be: {row.why}" if fits else row.why)
    if row.how == "convert":
        found = row.to(value, get)
        refused = isinstance(found, Refusal)
        return Setting(row.key, value, "refused" if refused else "mapped", () if refused else tuple(found),
                       found.why if refused else row.why)
    if row.how == "switch":
        return Setting(row.key, value, "mapped", (row.to,) if value else (), row.why)
    if value is None:
        return Setting(row.key, value, "refused", (), f"{row.to} needs a value")
    return Setting(row.key, value, "mapped", (row.to, str(value)), row.why)


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not name.endswith("override_transformer_config"):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _plain(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=True)
