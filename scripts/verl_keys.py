"""Write the keys that verl reads on the path of this recipe, as verl_patches/verl_keys.json has them.

    python scripts/verl_keys.py [--upstream DIR]    # line pypi: the installed verl; line a3: DIR/verl

verl's source is parsed, not run; tests/scripts/test_verl_keys.py compares it with the committed table. The scan
follows the configuration from what receives it (STARTS) through names, attributes of self, arguments, returns of
to_container and the like, and base classes, to each config.a.b, config["a"], config.get("a"), getattr(config, "a")
and OmegaConf.select(config, "a.b"). It does not follow the order of statements: a name stands for all that is ever
assigned to it, and actor and reference, which share a class, have each other's keys. "a.*": what is in section a is
handed on by ** or items() or update(), so every key below it is read.

It cannot see keys whose names are computed (for k in config), code behind a registry or a worker group, and code
outside of verl: configs/upstream.yaml lists those keys in `also_read`. Modules of OTHERS are left out: engines of other
recipes.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir
from verl_patches.upstream.pins import VERL_KEYS, read_by_verl

_MAIN, _WORKERS = "verl.trainer.main_ppo", "verl.workers.megatron_workers"
STARTS = {  # (module, function or class): the section that Hydra or Ray hands to its argument config
    (_MAIN, "run_ppo"): "",
    (_MAIN, "TaskRunner.run"): "",
    (_WORKERS, "ActorRolloutRefWorker"): "actor_rollout_ref",
    (_WORKERS, "CriticWorker"): "critic",
    (_WORKERS, "RewardModelWorker"): "reward_model",
}
OTHERS = re.compile(r"fsdp|sglang|dp_actor|dp_critic|hf_rollout|naive_rollout|async_server|vllm_rollout\.vllm_rollout$")
_SAME = {"to_container", "create", "dict", "deepcopy", "copy"}  # calls that return their first argument
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Section(NamedTuple):
    """A part of the configuration, by its dotted key."""

    key: str


class Defined(NamedTuple):
    """A function or class of verl: module and qualified name."""

    module: str
    name: str

    @property
    def owner(self) -> Defined:
        """The class of a method."""
        return Defined(self.module, self.name.rpartition(".")[0])


Values = set[Section | Defined]


class Scan:
    """The keys that the source of a verl package reads from the configuration."""

    def __init__(self, package: Path) -> None:
        self.package, self.read = package, set[str]()
        self.values: dict[tuple[Defined, str], Values] = defaultdict(set)  # of a name in a function or class
        self.nodes: dict[Defined, ast.AST] = {}
        self.names: dict[str, dict[str, Defined]] = {}  # of each module; behind an import it need not be defined
        self.reached, self.made_from = set[Defined](), defaultdict[Defined, set[Defined]](set)

    def keys(self) -> list[str]:
        """The keys that are read, sorted; a section whose keys are named is none."""
        size = None
        while size != (size := sum(map(len, (self.read, self.reached, *self.values.values())))):
            for start, key in STARTS.items():
                self._enter(Defined(*start), {"config": {Section(key)}})
            for function in sorted(self.reached):
                self._follow(function)
        own = OmegaConf.to_container(OmegaConf.load(self.package / f"trainer/config/{VERL_CONFIG}.yaml"), resolve=True)
        texts = tuple(f"{key}." for key, value in _leaves(own) if isinstance(value, str))  # which have no keys below
        found = {key for key in self.read if "." in key and not key.startswith(texts)}
        return sorted(found - {key.rpartition(".")[0] for key in found})

    def _names_of(self, module: str) -> dict[str, Defined]:
        """What a module of verl defines and imports, anywhere in it; its functions and classes are put into `nodes`."""
        if module in self.names:
            return self.names[module]
        names = self.names[module] = {}
        path = self.package.parent.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not module.startswith("verl.") or OTHERS.search(module) or not file.is_file():
            return names
        tree, package = ast.parse(file.read_bytes()), module.split(".") if path.is_dir() else module.split(".")[:-1]
        for node in ast.walk(tree):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
                origin = ".".join(base) if node.level else node.module
                if not OTHERS.search(origin):
                    names[alias.asname or alias.name] = Defined(origin, alias.name)
        for node in tree.body:
            if isinstance(node, _FUNCTIONS | ast.ClassDef):
                names[node.name] = Defined(module, node.name)
                self.nodes[names[node.name]] = node
                for method in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(method, _FUNCTIONS):
                        self.nodes[Defined(module, f"{node.name}.{method.name}")] = method
        return names

    def _find(self, module: str, name: str) -> Values:
        """The function or class that a name of a module stands for."""
        found = self._names_of(module).get(name)
        if found is None or found in self.nodes:
            return {found} - {None}
        return self._find(*found) if found != Defined(module, name) else set()

    def _line_of(self, cls: Defined) -> Iterator[Defined]:
        """A class and its bases in verl."""
        self._names_of(cls.module)
        if isinstance(self.nodes.get(cls), ast.ClassDef):
            yield cls
            for base in self.nodes[cls].bases:
                for found in self._find(cls.module, getattr(base, "id", "")):
                    yield from self._line_of(found)

    def _methods(self, classes: Iterable[Defined], name: str) -> list[Defined]:
        """The methods of that name, in the order of the classes."""
        found = (Defined(cls.module, f"{cls.name}.{name}") for cls in classes)
        return [method for method in found if method in self.nodes]

    def _enter(self, callee: Defined, given: Mapping[str | int, Values]) -> None:
        """A call with values by parameter or position. All methods of a class that is called are reached."""
        self._names_of(callee.module)
        classes = list(self._line_of(callee))
        for cls in classes:
            self.made_from[cls] |= {callee}
            self.reached |= {one for one in self.nodes if one.owner == cls and one not in classes}
        for function in self._methods(classes, "__init__")[:1] if classes else [callee]:
            if function in self.nodes:
                self.reached.add(function)
                arguments = self.nodes[function].args
                names = [one.arg for one in arguments.args if one.arg != "self"]
                for place, values in given.items():
                    name = names[place] if isinstance(place, int) and place < len(names) else place
                    if name in [*names, *(one.arg for one in arguments.kwonlyargs)]:
                        self.values[function, name] |= values

    def _follow(self, function: Defined) -> None:
        """Note what one function, with those nested in it, assigns, calls and reads."""
        nodes = list(ast.walk(self.nodes[function]))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                pairs = [(node.targets[0], node.value)]
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
                for target, value in pairs:
                    if isinstance(target, ast.Name):
                        self.values[function, target.id] |= self._value(function, value)
                    elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                        self.values[function.owner, target.attr] |= self._value(function, value)
            elif isinstance(node, ast.expr) and id(node) not in called:
                self._value(function, node)

    def _value(self, function: Defined, node: ast.AST) -> Values:
        """What an expression may be; a key on the way to it is read."""
        match node:
            case ast.Name(id=name):
                return self.values[function, name] | self._find(function.module, name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                line = [*self._line_of(function.owner), *self.made_from[function.owner]]  # bases read what others set
                return set(self._methods(line, name)).union(*(self.values[cls, name] for cls in line))
            case ast.Attribute(value=value, attr=attr, ctx=ast.Load()):
                module = self._names_of(function.module).get(getattr(value, "id", ""))
                inside = self._find(".".join(module), attr) if module else set()
                return inside | self._below(self._value(function, value), attr)
            case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
                return self._below(self._value(function, value), key)
            case ast.BoolOp(values=values):
                return set().union(*(self._value(function, value) for value in values))
            case ast.IfExp(body=body, orelse=orelse):
                return self._value(function, body) | self._value(function, orelse)
            case ast.Call():
                return self._call(function, node)
        return set()

    def _below(self, values: Values, key: str) -> Values:
        found = {Section(f"{value.key}.{key}".lstrip(".")) for value in values if isinstance(value, Section)}
        self.read |= {section.key for section in found}
        return found

    def _whole(self, values: Values) -> None:
        self._below({value for value in values if isinstance(value, Section) and "." in value.key}, "*")

    def _call(self, function: Defined, node: ast.Call) -> Values:
        """What a call returns, where that is a part of the configuration; its arguments are handed to the callee."""
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        name, owner = getattr(node.func, "attr", getattr(node.func, "id", "")), set()
        if of is not None:
            owner = self._value(function, of)
        given = {place: self._value(function, one) for place, one in enumerate(node.args)}
        given |= {one.arg: self._value(function, one.value) for one in node.keywords if one.arg}
        for keyword in node.keywords:
            if keyword.arg is None:
                self._whole(self._value(function, keyword.value))
        words = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if name in ("get", "pop") and words:
            return self._below(owner, words[0])
        if name in ("select", "getattr") and words:
            return self._below(given[0], words[0])
        if name in _SAME:
            return given.get(0, set())
        if name in ("items", "update"):
            self._whole(owner if name == "items" else given.get(0, set()))
        if isinstance(of, ast.Call) and getattr(of.func, "id", "") == "super":
            callees = self._methods([*self._line_of(function.owner)][1:], name)
        elif any(isinstance(value, Section) for value in owner):  # a method of a value, such as path.split
            callees = ()
        else:
            callees = owner if name == "remote" else self._value(function, node.func)
        for callee in callees:
            if isinstance(callee, Defined):
                self._enter(callee, given)
        return set()


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def table(keys: Mapping[str, Iterable[str]]) -> dict[str, dict[str, str]]:
    """{line: its keys} as the committed file has it, {lines: {section: keys below it}}, for few and short lines."""
    found: dict[str, dict[str, list[str]]] = {}
    for key in sorted(set().union(*keys.values())):
        lines = " ".join(line for line in sorted(keys) if key in keys[line])
        parts = key.split(".")
        depth = 2 if parts[0] == "actor_rollout_ref" and len(parts) > 2 else 1
        found.setdefault(lines, {}).setdefault(".".join(parts[:depth]), []).append(".".join(parts[depth:]))
    return {lines: {name: " ".join(names) for name, names in sections.items()} for lines, sections in found.items()}


def main() -> None:
    """Scan, say what changed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, help="folder with the clone verl, at the pin of line a3")
    options = parser.parse_args()
    keys = {"pypi": Scan(verl_config_dir().parents[1]).keys(), "a3": sorted(read_by_verl("a3"))}
    if options.upstream:
        keys["a3"] = Scan(verl_config_dir(options.upstream / "verl").parents[1]).keys()
    for line, found in keys.items():
        changed = sorted(set(found) ^ read_by_verl(line))
        print(f"{line}: {len(found)} keys, {len(changed)} changed: {' '.join(changed[:9])}")
    VERL_KEYS.write_text(json.dumps(table(keys), indent=1) + "\n")


if __name__ == "__main__":
    main()
