"""Try every order of events on patches and compare with a small model; run as a program in a fresh process.

    python orders_world.py FOLDER WORLD LENGTH [SPOIL]

A world is a fresh fake package for each sequence of steps, with patches on every kind of target. WORLD names its fault:
`healthy`: none; `provider`: one patch's provider raises ImportError until the step heal; `body`: the module's own
code raises at its first import; `inside-` before one of them: the module's first line applies the patches, as the
prelude line does. SPOIL breaks the engine on purpose. Prints {"sequences": n, "faults": [text, ...]} as JSON.
"""

import itertools
import json
import random
import sys
from pathlib import Path

from tests.patching.world import review_all, row, write
from verl_patches.patching import hooks
from verl_patches.patching.engine import Engine, PatchError
from verl_patches.patching.switches import Switches

BASE = """
    from __main__ import world
    world.in_body()
    TABLE = {"a": 1}
    def f(x): return x + 1
    def g(x): return x
    class Thing:
        def plain(self): return "plain"
        @staticmethod
        def st(x): return x
        @classmethod
        def cl(cls): return cls.__name__
        @property
        def prop(self): return "prop"
        class Inner:
            def deep(self): return "deep"
    class Child(Thing): pass
"""
OURS = """
    from __main__ import world
    def louder(original): return lambda *a, **k: f"{original(*a, **k)}!"
    def entries(): return {"b": 2}
    def flaky(original):
        world.in_provider()
        return lambda x: f"{original(x)}!"
"""
# Patch id, target, provider; those after t.flaky come after the one that fails.
ROWS = (
    ("t.f", "f", "louder"),
    ("t.over_f", "f", "louder"),
    ("t.plain", "Thing.plain", "louder"),
    ("t.st", "Thing.st", "louder"),
    ("t.cl", "Thing.cl", "louder"),
    ("t.child_cl", "Child.cl", "louder"),
    ("t.flaky", "g", "flaky"),
    ("t.prop", "Thing.prop", "louder"),
    ("t.child_st", "Child.st", "louder"),
    ("t.deep", "Thing.Inner.deep", "louder"),
    ("t.table", "TABLE", "entries"),
    ("t.added", "added", "louder"),
)
ROWS_BEFORE_FLAKY = [row[0] for row in ROWS[:6]]
UPSTREAM_VALUES = {"f": 2, "user": 2, "g": 3, "plain": "plain", "prop": "prop", "deep": "deep", "table": {"a": 1}}
UPSTREAM_VALUES |= {"st": "s", "cl": "Thing", "child_cl": "Child", "child_st": "s", "added": False}
PATCHED_VALUES = {
    "t.f": {},
    "t.over_f": {"f": "2!!", "user": "2!!"},
    "t.plain": {"plain": "plain!"},
    "t.st": {"st": "s!", "child_st": "s!"},
    "t.cl": {"cl": "Thing!", "child_cl": "Child!"},
    "t.child_cl": {"child_cl": "Child!!"},
    "t.flaky": {"g": "3!"},
    "t.prop": {"prop": "prop!"},
    "t.child_st": {"child_st": "s!!"},
    "t.deep": {"deep": "deep!"},
    "t.table": {"table": {"a": 1, "b": 2}},
    "t.added": {"added": True},
}


class World:
    """Hold one fresh package, an engine over it, and the model: what was applied, imported, healed."""

    def __init__(self, folder, number, kind):
        self.name = f"up{number}"
        self.inside, self.kind = kind.startswith("inside-"), kind.removeprefix("inside-")
        write(folder, self.name, base=BASE, ours=OURS, user=f"from {self.name}.base import f\n")
        self.engine = Engine(self.rows(), Switches("pypi", "cpu"))
        self.taken_up = self.applied = False
        self.healed, self.bodies = self.kind != "provider", 0
        self.base = self.user = False
        self.stuck = self.failed_import = False  # t.flaky stopped an apply(), or an import

    def rows(self):
        kinds = {"t.table": "register", "t.added": "extend"}
        for name, target, provider in ROWS:
            bindings = (f"{self.name}.user:f",) if target == "f" else ()
            needs = ("t.f",) if name == "t.over_f" else ()
            place, ours = f"{self.name}.base:{target}", f"{self.name}.ours:{provider}"
            yield row(name, place, kinds.get(name, "wrap"), ours, needs=needs, bindings=bindings)

    def in_body(self):
        self.bodies += 1
        if self.inside and self.bodies == 1:  # a second import of the prelude does nothing
            self.engine.apply()
        if self.kind == "body" and self.bodies == 1:
            raise ImportError("upstream's own fault")

    def in_provider(self):
        if not self.healed:
            raise ImportError("our fault")

    # -- steps: what the model says, then what happens

    def step(self, name):
        wanted = getattr(self, f"model_{name}")()
        actions = {"import": (__import__, f"{self.name}.base"), "user": (__import__, f"{self.name}.user")}
        actions |= {"apply": (self.engine.apply,), "revert": (self.engine.revert,)}
        actions |= {"verify": (self.engine.verify, "worker"), "heal": (lambda: None,)}
        function, *arguments = actions[name]
        try:
            function(*arguments)
            got = None
        except Exception as error:
            got = type(error)
        assert got is wanted, f"{name} raised {got}, expected {wanted}"

    def model_import(self):
        if self.base:
            return None
        body_fails = self.kind == "body" and self.bodies == 0
        if self.inside and self.bodies == 0:
            self.applied = self.taken_up = True
        if body_fails:
            return ImportError
        self.base = not self.applied or self.healed
        self.failed_import = not self.base
        return None if self.base else PatchError

    def model_user(self):
        error = self.model_import()
        self.user = self.user or error is None
        return error

    def model_apply(self):
        self.applied = self.taken_up = True
        self.stuck = self.base and not self.healed
        return PatchError if self.stuck else None

    def model_revert(self):
        self.applied = self.stuck = self.failed_import = False

    def model_verify(self):
        return None if self.applied and self.base and not self.stuck else PatchError

    def model_heal(self):
        self.healed = True

    def look(self):
        """Compare states and a caller's view with the model."""
        states = {row["id"]: row["state"] for row in self.engine.status()}
        assert states == self.model_states(states), f"states {states}, expected {self.model_states(states)}"
        assert (f"{self.name}.base" in sys.modules) == self.base, "left imported" if not self.base else "not imported"
        if self.base:
            active = [PATCHED_VALUES[name] for name in states if states[name] == "active"]
            wanted = {**UPSTREAM_VALUES, **{key: value for entries in active for key, value in entries.items()}}
            if not self.user:
                wanted.pop("user")
            assert self.seen() == wanted, f"a caller sees {self.seen()}, expected {wanted}"

    def model_states(self, names):
        if not self.applied:
            return dict.fromkeys(names, "reverted" if self.taken_up else "off")
        if not self.base:
            return {**dict.fromkeys(names, "waiting"), **({"t.flaky": "failed"} if self.failed_import else {})}
        if self.stuck:
            return {n: "failed" if n == "t.flaky" else "active" if n in ROWS_BEFORE_FLAKY else "waiting" for n in names}
        return dict.fromkeys(names, "active")

    def seen(self):
        base = sys.modules[f"{self.name}.base"]
        thing = base.Thing()
        found = {
            "f": base.f(1),
            "plain": thing.plain(),
            "st": thing.st("s"),
            "cl": base.Thing.cl(),
            "g": base.g(3),
            "child_cl": base.Child.cl(),
            "child_st": base.Child.st("s"),
            "prop": thing.prop,
            "deep": base.Thing.Inner().deep(),
            "table": dict(base.TABLE),
            "added": hasattr(base, "added"),
        }
        return {**found, "user": sys.modules[f"{self.name}.user"].f(1)} if self.user else found


def sequences(kind, length):
    steps = ["import", "user", "apply", "revert", "verify", *(["heal"] if kind.endswith("provider") else [])]
    yield from itertools.product(steps, repeat=length)
    chance = random.Random(7)
    yield from (chance.choices(steps, k=10) for _ in range(60))


def spoil(what):
    """Break the engine, so that the comparison must find a fault."""
    if what == "arms once":
        armed, arm = set(), hooks._arm_hooks
        hooks._arm_hooks = lambda name: name in armed or armed.add(name) or arm(name)
    elif what == "never arms":
        hooks._arm_hooks = lambda name: None
    elif what == "no rebinding":
        Engine._bind = lambda self, row, binding: None
    elif what == "lower row looks alone":
        Engine._uppermost = lambda self, target, found: found
    elif what == "unwatched":
        hooks._watch_module = lambda module: hooks._run_hooks(module.__spec__.name, module)


def main(folder, kind, length, *spoilt):
    global world
    for what in spoilt:
        spoil(what)
    sys.path.insert(0, folder)
    count, faults = 0, []
    for count, sequence in enumerate(sequences(kind, int(length)), 1):
        world = World(Path(folder), count, kind)
        done = []
        try:
            for step in sequence:
                done.append(step)
                world.step(step)
                world.look()
        except Exception as error:
            faults.append(f"{' '.join(done)}: {type(error).__name__}: {error}")
        for name in [n for n in sys.modules if n.startswith(world.name)]:
            del sys.modules[name]
    print(json.dumps({"sequences": count, "faults": faults[:20]}))


if __name__ == "__main__":
    review_all()
    main(*sys.argv[1:])
