"""Compose a configuration from verl's trainer config, a file of configs/, the recipe's defaults, and overrides.

verl's config is read where verl is installed or checked out; this repository has no copy of it.

The result is plain and fully resolved: what is printed, stored and handed to the driver is what runs. `compose` then
returns the facts of the run, which run/resolve.py derives.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_patches.errors import ConfigError
from verl_patches.layout.flops import balanced_layers
from verl_patches.layout.inventory import first_layers, read_model_shape
from verl_patches.patching.spec import LINES, PatchSpec
from verl_patches.recipe import VLLM_DTYPES, Recipe, recipe_from, recipe_keys
from verl_patches.rewards.parts import reward_parts
from verl_patches.run.engine_options import check_engine_options, rewrite_engine_options
from verl_patches.run.resolve import CONFIGS_DIR, LAYER_COUNT_KEYS, MODEL_LAYERS_KEY, model_shape_file, resolve
from verl_patches.run.run_start import with_start
from verl_patches.run.verl_values import check_recipe, check_verl_values
from verl_patches.shared_files import absolute_path, expand_home
from verl_patches.spec import RunSpec, Trees
from verl_patches.upstream.checkouts import GIT_LINE, VERL_CONFIG, add_platform_trees, verl_config_dir
from verl_patches.upstream.pins import load_pins
from verl_patches.upstream.support import key_refusal
from verl_patches.values import is_secret, leaves, read_yaml, unknown_key

RowProvider = Callable[[str], Iterable[PatchSpec]]  # returns the catalogue's rows (patches) on a platform (catalog.py)
HYDRA_GROUPS = ("algo", "layout", "level", "rollout")  # Hydra's groups: folders of configs/ with a file for each choice
SCHEMA_NAME = "recipe_schema"
_EXPORT_HINT = "remove it, and export the secret as a variable of the shell, which the run inherits"
_PATH_KEYS = (  # keys of files and folders, some of them read in workers
    "actor_rollout_ref.model.path critic.model.path critic.model.tokenizer_path reward_model.model.input_tokenizer "
    "data.train_files data.val_files data.tokenizer data.custom_cls.path custom_reward_function.path "
    "recipe.rollout.replay trainer.resume_from_path trainer.rollout_data_dir trainer.validation_data_dir "
    "ray_init.timeline_json_file"
).split()


def compose(
    config_name: str,
    overrides: Sequence[str],
    platform_rows: RowProvider,
    trees: Trees = Trees(),  # noqa: B008 frozen
) -> RunSpec:
    """Return the facts of a run of configs/`config_name`.yaml with Hydra `overrides` over verl's config.

    platform_rows: returns the catalogue's rows (patches) on a platform; `RunSpec.rows` has the ids of those that the
    run switches on. trees: checkouts that the run imports; verl's config is that of `trees.verl`, or of the installed
    verl, which is located but not imported. Raises ConfigError for an unknown config, key or override, a value of the
    wrong kind, or a recipe that contradicts itself, and LayoutError where a layout cannot be built.
    """
    config = compose_config(config_name, overrides, verl_path=trees.verl)
    platform = config.recipe.platform
    return with_start(
        resolve(config, platform_rows(platform), override_keys(overrides), add_platform_trees(platform, trees))
    )


def compose_config(config_name: str, overrides: Sequence[str] = (), *, verl_path: Path | None = None) -> DictConfig:
    """Return the composed configuration, resolved and checked; arguments and errors are those of `compose`."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    name = config_name.removesuffix(".yaml")
    runs = [path.stem for path in sorted(CONFIGS_DIR.glob("*.yaml")) if path.is_file() and _is_run_config(path)]
    if name not in runs:
        raise ConfigError(
            f"config {config_name}: expected one of {', '.join(runs) or 'none'}, found no such run in {CONFIGS_DIR}; "
            "put a file of your own there, with `algo: NAME` at the end of its defaults (docs/configuration.md)"
        )
    line = next((word.partition("=")[2] for word in reversed(overrides) if word.startswith("recipe.line=")), LINES[0])
    overrides = [re.sub("^layout=(?=[^/]+$)", f"layout={line}/", word) for word in overrides]
    _check_overrides(overrides)
    overrides = [_quote_home(override) for override in overrides]
    upstream = verl_config_dir(verl_path)
    ConfigStore.instance().store(SCHEMA_NAME, node=Recipe, package="recipe")
    OmegaConf.register_new_resolver("vllm_dtype", lambda dtype: VLLM_DTYPES.get(dtype, dtype), replace=True)
    OmegaConf.register_new_resolver("part", lambda whole, parts: max(1, whole // parts), replace=True)
    OmegaConf.register_new_resolver("not", lambda value: not value, replace=True)
    OmegaConf.register_new_resolver("more_dies", lambda than, nodes, dies: nodes * dies > than, replace=True)
    OmegaConf.register_new_resolver("repo_path", lambda path: str(CONFIGS_DIR.parent / path), replace=True)
    base = _load_yaml(upstream / f"{VERL_CONFIG}.yaml")
    try:
        with initialize_config_dir(str(CONFIGS_DIR), version_base="1.3"):
            composed = hydra_compose(name, [f"hydra.searchpath=[file://{upstream}]", *overrides])
        config = OmegaConf.create(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(_explain_error(error, name, base)) from error
    _refuse_secrets(leaves(OmegaConf.to_container(config)))
    check_recipe(OmegaConf.to_container(config.recipe))
    check_verl_values(OmegaConf.to_container(config), OmegaConf.to_container(base))
    reward_parts(config)
    check_engine_options(config, override_keys(overrides), config)
    rewrite_engine_options(config)
    _write_layer_count(config)
    config.recipe.output_root = str(output_root(config.recipe.output_root))  # workers have other current folders
    folder = Path(config.recipe.output_root, config.recipe.run)
    config.trainer.default_local_dir = str(folder / expand_home(config.trainer.default_local_dir))
    _check_verl_keys(config, base, name)
    check_dtype(config)
    _make_paths_absolute(config)
    write_reward_models(config)
    return config


def _make_paths_absolute(config: DictConfig) -> None:
    """Make the paths of `_PATH_KEYS` absolute, because workers have other current folders."""
    for above, _, name in (key.rpartition(".") for key in _PATH_KEYS):
        section = OmegaConf.select(config, above)
        if isinstance(found := section.get(name), ListConfig):
            section[name] = list(map(absolute_path, found))
        elif found and isinstance(found, str):
            section[name] = absolute_path(found)


def write_reward_models(config: DictConfig) -> None:
    """Write the reward models of recipe.rewards into verl's section for them; their paths become absolute."""
    for entry in config.recipe.rewards or ():
        if entry.get("path"):
            entry.path = absolute_path(entry.path)
    if any(entry.name == "reward_model" for entry in config.recipe.rewards or ()):
        config.reward_model.enable = True
        config.reward_model.model.override_config = config.actor_rollout_ref.model.override_config


def _is_run_config(path: Path) -> bool:
    """Return whether a file of configs/ has an algorithm in its defaults; base files and the pin file have none."""
    return re.search(rb"(?m)^defaults:[^#]*\balgo: ?\w", path.read_bytes()) is not None


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that are not key=value, are unprintable, choose an unknown file of a group or hold a secret."""
    for override in overrides:
        if not re.match(r"[~+]*[^=~+@\s]", override):
            raise ConfigError(f"override {override!r}: expected key=value, such as trainer.total_training_steps=3")
        key, _, value = override.partition("=")
        if not override.isprintable():
            raise ConfigError(f"override of {key!r}: expected printable text in UTF-8, found other characters")
        if key in HYDRA_GROUPS:
            check_choice(key, value, CONFIGS_DIR / key)
        if key == "recipe.level":
            raise ConfigError(f"{override}: expected level={value}, which sets the keys of the level too")
        _refuse_secrets([(key.lstrip("+~"), "" if value == "null" else value.strip("'\""))])


def _quote_home(override: str) -> str:
    """Return an override with quotes around values such as ~/a, which Hydra's grammar has no place for."""
    quoted, home = r"'[^']*'|\"[^\"]*\"", r"(?<=[=\[,:\s])~[^\s,\[\]{}()]*"
    return re.sub(f"{quoted}|{home}", lambda found: f"'{found[0]}'" if found[0][0] == "~" else found[0], override)


def check_choice(group: str, name: str, folder: Path) -> None:
    """Raise ConfigError, with the known names, where `folder` of a Hydra group has no `name`.yaml."""
    names = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    if name not in names:
        raise ConfigError(f"{group}={name}: expected one of {', '.join(names)}")


def _refuse_secrets(values: Iterable[tuple[str, Any]]) -> None:
    """Refuse a key whose value looks like a secret, because a run's configuration is written to files and logs."""
    for key, value in values:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                _refuse_secrets(leaves(one, f"{key}."))
            elif is_secret(key.rpartition(".")[2], one):
                raise ConfigError(f"{key} looks like a secret, but configurations are written to files: {_EXPORT_HINT}")


def output_root(given: str | None = None) -> Path:
    """Return the absolute folder of all runs: `given` (may be relative), or outputs/ of this repository."""
    return CONFIGS_DIR.parent / "outputs" if given is None else Path(absolute_path(given))


@functools.cache
def _load_yaml(path: Path) -> DictConfig:
    return OmegaConf.create(read_yaml(path))


def _explain_error(error: BaseException, name: str, base: DictConfig) -> str:
    """Return Hydra's error as one sentence that says what to change."""
    if isinstance(error, YAMLError):
        return f"config {name}: {' '.join(str(error).split())}"
    if isinstance(error, RecursionError):
        return f"{CONFIGS_DIR / name}.yaml: its defaults include the file itself, or an override has too many brackets"
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts += [str(cause).strip()] if str(cause).strip() else []
        cause = cause.__cause__ or cause.__context__
    override = re.search(r"Could not override '([^']+)'", texts[0])
    missing = re.search(r"Key '([^']+)' (?:is )?not in '?\w+'?\s+full_key: (\S+)", "\n".join(texts))
    key = missing[2] if missing else ""
    if override:
        key = override[1]
    if key in HYDRA_GROUPS:
        return f"{key}=...: {CONFIGS_DIR / name}.yaml has no `{key}: NAME` in its defaults or those of its base; add it"
    if override or key.startswith("recipe"):
        if any(load_pins().may_be_added(key, line) for line in LINES):
            return f"{key} is not in verl's config file, although verl reads it: add it as +{key}=..."
        known = dict(recipe_keys()) | dict.fromkeys([*HYDRA_GROUPS, *_leaf_keys(base)])
        return unknown_key(key, known, "verl has no such key")
    lines = list(dict.fromkeys(text.splitlines()[0] for text in texts if text != "None"))
    grammar = "token recognition error", "mismatched input", "no viable alternative"
    quoted = any(words in text for text in texts for words in grammar)
    hint = "; put an override with blanks, brackets or other special characters in quotes, as "
    hint = f"""{hint}'KEY=[a, b]' or 'KEY="a=b"'""" if quoted else ""
    return f"config {name}: {'; '.join(lines[:2])}{hint}"


def override_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys that `overrides` set."""
    return [override.lstrip("+").partition("=")[0] for override in overrides]


def _check_verl_keys(config: DictConfig, base: DictConfig, name: str) -> None:
    """Refuse a key, of a file of configs/ or given as +key=value, that nothing is known to read.

    Allowed are the keys of verl's own config, those that the pin file and recipe.added_keys list beside them, and with
    a dataset class of the user all of `data`, as the class may read keys of its own.
    """
    free = ("recipe.", "data.") if has_own_dataset(config.data.custom_cls.path) else ("recipe.",)
    line, pins, known, faults = config.recipe.line, load_pins(), dict.fromkeys(_leaf_keys(base)), []
    hint = "verl's config file has no such key; list a key that your own code reads in recipe.added_keys=[KEY]"
    for key in _leaf_keys(config):
        above = any(other.startswith(f"{key}.") for other in known)
        own = any(fnmatchcase(key, name) or key.startswith(f"{name}.") for name in config.recipe.added_keys)
        allowed = own or key.startswith(free) or pins.may_be_added(key, line)
        if key not in known and not above and not allowed:
            faults.append(key_refusal(config, key) or f"nothing reads this key: {unknown_key(key, known, hint)}")
    if faults:
        raise ConfigError(f"config {name}:\n  " + "\n  ".join(faults))


def has_own_dataset(class_file: str | None) -> bool:
    """Return whether data.custom_cls.path is a file of the user, whose class then reads the data."""
    return class_file not in (None, str(CONFIGS_DIR.parent / "verl_patches/step/objectives/dataset.py"))


def check_dtype(config: DictConfig) -> None:
    """Refuse a rollout whose dtype differs from that of the training."""
    expected, found = VLLM_DTYPES[config.recipe.dtype], config.actor_rollout_ref.rollout.dtype
    if expected != found:
        raise ConfigError(
            f"actor_rollout_ref.rollout.dtype: expected {expected}, as recipe.dtype={config.recipe.dtype} trains, "
            f"found {found}: weights of two dtypes cannot be compared; set recipe.dtype only, the rollout's follows it"
        )


def _write_layer_count(config: DictConfig) -> None:
    """Write recipe.num_hidden_layers where training and vLLM read it, and balance a shortened model over stages.

    Raise ConfigError for a number outside the model or too small for its stages, and where a key has another number.
    """
    layers = config.recipe.num_hidden_layers
    if layers is None:
        return
    recipe, megatron = recipe_from(OmegaConf.to_container(config.recipe)), config.actor_rollout_ref.actor.megatron
    whole = read_model_shape(model_shape_file(recipe))
    chunks = megatron.pipeline_model_parallel_size * (megatron.virtual_pipeline_model_parallel_size or 1)
    dense, most = whole.first_k_dense_replace, whole.num_hidden_layers
    if not dense + chunks <= layers <= most:
        raise ConfigError(
            f"{MODEL_LAYERS_KEY} is {layers}; expected {dense + chunks} to {most}: at least the {dense} dense layers "
            f"and one MoE layer for each of {chunks} pipeline stages, at most the layers of {config.recipe.model_shape}"
        )
    for place in LAYER_COUNT_KEYS:
        if OmegaConf.select(config, place) not in (None, layers):
            raise ConfigError(
                f"{place} is set; expected none, as {MODEL_LAYERS_KEY}={layers} is copied there; remove it"
            )
        OmegaConf.update(config, place, layers, force_add=True)
    stages = config.recipe.train.layers_per_stage
    balance = sum(stages) == most if stages else config.recipe.line == GIT_LINE and chunks > 1
    if balance and layers < most:
        config.recipe.train.layers_per_stage = balanced_layers(first_layers(whole, layers), chunks)


def _leaf_keys(section: DictConfig) -> list[str]:
    """Return the dotted keys of all leaves; missing and interpolated values and empty sections are leaves too."""
    return [key for key, _ in leaves(OmegaConf.to_container(section, resolve=False))]
