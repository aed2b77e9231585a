"""Define a small upstream package, and names for code that a test runs in its own process (fixture `play`)."""

import logging
import textwrap

from verl_patches.patching import engine as engines
from verl_patches.patching import fingerprint
from verl_patches.patching.engine import Engine, PatchError
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import parse_switches

FILES = {
    "up/__init__.py": "",
    "up/base.py": """
        TABLE = {"a": 1}
        NOTHING = None
        CONSTANT = 1
        def f(x): return x
        def g(x): return x
        class Thing:
            def m(self): return "m"
            @staticmethod
            def st(x): return x
            @classmethod
            def cl(cls): return cls.__name__
            @property
            def prop(self): return 1
    """,
    "up/user.py": "from up.base import f\n",
    "up/other.py": "def h(x): return x\nclass Thing: pass\n",
    "ours.py": """
        import functools
        from verl_patches.patching.engine import is_on
        def louder(original):
            @functools.wraps(original)
            def ours(*a, **k): return f"{original(*a, **k)}!"
            return ours
        def asking(original): return lambda *a, **k: f"{original(*a, **k)}?"
        def narrow(original): return lambda a: original(a)
        def entries(): return {"b": 2}
        VALUE = object()
        def nothing(original): return None
        def same(original): return original
        def bad(original): raise ImportError("no such thing")
        def exits(original): raise SystemExit(3)
        class OurThing:
            def m(self): return f"{super().m()} and ours" if is_on("t.feature") else super().m()
        class NotOver:
            def m(self): return "of a class that is nowhere in place"
        class Narrow:
            def m(self, extra): return extra
    """,
    "standin_mod.py": """
        from types import ModuleType
        answer = 42
        inner, object_ = ModuleType("inner"), ModuleType("object_")
        inner.deep = object_.deep = ModuleType("deep")
        inner.deep.answer = 43
    """,
    # A manager of patches may walk all of sys.modules like this.
    "theirs.py": """
        import functools, sys
        def put(module, name, make):
            old = getattr(sys.modules[module], name)
            new = make(old)
            for other in list(sys.modules.values()):
                if getattr(other, name, None) is old: setattr(other, name, new)
        def replacing(old):
            def quick(x): return "theirs"
            return quick
        def wrapping(old):
            @functools.wraps(old)
            def wrapper(*a): return f"<{old(*a)}>"
            return wrapper
        def other(x): return x
    """,
}
warned = []


def write(folder, package, **files):
    """Write a package of modules {name: text}."""
    (folder / package).mkdir()
    for name, text in {"__init__": "", **files}.items():
        (folder / package / f"{name}.py").write_text(textwrap.dedent(text))


def forget_files():
    """Let fingerprints read all files anew."""
    for cached in (fingerprint.file_hash, fingerprint._parse_file, fingerprint._binding_paths):
        cached.cache_clear()


class _RecordHandler(logging.Handler):
    def emit(self, record):
        warned.append(record.getMessage())


logging.getLogger("verl_patches").addHandler(_RecordHandler(logging.WARNING))


def row(id, target="up.base:f", kind="wrap", provider="ours:louder", **more):
    return PatchSpec(id, target, kind, provider, "why", "exit", **more)


F = row("t.f", bindings=("up.user:f",))
OVER = row("t.over", provider="ours:asking", bindings=("up.user:f",), needs=("t.f",))
CLASS = row("t.class", "up.base:Thing", "subclass", "ours:OurThing")
FEATURE = row("t.feature", "up.base:Thing.m", "override", "ours:OurThing.m", needs=("t.class",))


def engine(*rows, text=""):
    """Make an engine with the switches `text` and set it as the process's own."""
    engines.process_engine.value = Engine(rows, parse_switches(f"line=pypi,platform=cpu,{text}"))
    return engines.process_engine.value


def drift(*targets, reviewed="0" * 16):
    """Make these targets differ from the reviewed code from now on; all others are as reviewed."""
    fingerprint.reviewed_hash = lambda line, target: reviewed if target in targets else fingerprint.fingerprint(target)


def review_all():
    """Take every target as reviewed, whatever its code."""
    fingerprint.reviewed_hash = fingerprint.current_hash = lambda line, target: "0" * 16


def row_states(e):
    return {row["id"]: [row["state"], row["reason"]] for row in e.status()}


def states(e):
    return {row["id"]: row["state"] for row in e.status()}


def catch_error(action):
    """Return the error that a call raises, as text; None without one."""
    try:
        action()
    except (PatchError, ImportError, ValueError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def verify_error(e):
    return catch_error(lambda: e.verify("worker"))
