"""The patch engine on a small fake upstream package, each order of events in a fresh interpreter."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine
from verl_patches.patching.spec import PatchSpec, validate
from verl_patches.patching.switches import Switches, parse

ROOT = Path(__file__).resolve().parents[2]
CPU = Switches("pypi", "cpu")

UPSTREAM = {
    "up/__init__.py": "",
    "up/base.py": """
        TABLE = {"a": 1}
        NOTHING = None
        def f(x):
            "doc"
            return x + 1
        class Thing:
            def plain(self): return "plain"
            @staticmethod
            def st(x): return x
            @classmethod
            def cl(cls): return cls.__name__
            @property
            def prop(self): return 1
    """,
    "up/user.py": "from up.base import f\ndef use(): return f(1)\n",
    "up/worker.py": """
        import ours_prelude
        from up.base import f
        def work(): return 1
    """,
    "ours.py": """
        def plus_ten(original):
            def f(x): return original(x) + 10
            return f
        def louder(original):
            return lambda *a: f"{original(*a)}!"
        def louder_class(original):
            return lambda cls: f"{original(cls)}!"
        def entries(): return {"b": 2}
        VALUE = object()
        def bad(original): raise ImportError("no such thing")
    """,
    "standin_mod.py": """
        from types import ModuleType
        answer = 42
        inner, object_ = ModuleType("inner"), ModuleType("object_")
        inner.deep = object_.deep = ModuleType("deep")
        inner.deep.answer = 43
    """,
}


@pytest.fixture
def tree(tmp_path):
    for name, text in UPSTREAM.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


PREAMBLE = """
import sys
from verl_patches.patching.engine import Engine, PatchError
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import Switches, parse
def row(id, target, kind="wrap", provider="ours:plus_ten", **more):
    return PatchSpec(id=id, stage="model", target=target, kind=kind, provider=provider, why="test", exit="no", **more)
def engine(*rows, text=""):
    return Engine(rows, parse("line=pypi,platform=cpu," + text))
F = row("t.f", "up.base:f", bindings=("up.user:f",))
def state(e, id="t.f"): return next(s["state"] for s in e.status() if s["id"] == id)
"""


def run(tree, code):
    path = f"{tree}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("order", ["apply import", "import apply", "user apply", "apply user", "apply apply user"])
def test_orders_of_import_and_apply(tree, order):
    steps = {"apply": "e.apply()", "import": "import up.base", "user": "import up.user"}
    code = ["e = engine(F)", *(steps[s] for s in order.split())]
    run(
        tree,
        "\n".join(
            [
                *code,
                "import up.user",
                "assert up.user.use() == 12, up.user.use()",
                "assert state(e) == 'active'",
                "e.verify('worker')",
                "e.revert()",
                "assert up.user.use() == 2",
                "assert state(e) == 'reverted'",
                "e.apply()",
                "assert up.user.use() == 12",
            ]
        ),
    )


def test_revert_before_the_import_does_not_double_the_patch(tree):
    run(
        tree,
        """
        e = engine(F, row("t.new", "up.base:added", "extend", "ours:VALUE"))
        e.apply(); e.revert(); e.apply(); e.revert(); e.apply()
        import up.user
        assert up.user.use() == 12, up.user.use()
        e.verify("worker")
    """,
    )


def test_a_row_goes_over_what_it_needs_whichever_hook_runs_first(tree):
    """Where an import ends while apply() adds hooks, that of the upper row can come first."""
    run(
        tree,
        """
        from verl_patches.patching import hooks
        take = hooks._take
        hooks._take = lambda name: take(name)[::-1]
        e = engine(F, row("t.over", "up.base:f", provider="ours:louder", bindings=("up.user:f",), needs=("t.f",)))
        e.apply()
        import up.user
        assert up.user.use() == "12!", up.user.use()
        e.verify("worker")
    """,
    )


def test_an_installed_package_is_used_in_place_of_its_stub(tree):
    run(
        tree,
        """
        e = engine(row("t.stub", "up", "stub", "standin_mod"), row("t.gone", "no_such_package", "stub", "standin_mod"))
        try: e.verify("worker")  # the control: nothing was applied, and no package is there instead
        except PatchError as error: assert "t.gone is off" in str(error) and "t.stub" not in str(error)
        else: raise SystemExit("not seen")
        e.apply()
        assert state(e, "t.stub") == "off" and state(e, "t.gone") == "active"
        e.verify("worker")
    """,
    )


@pytest.mark.parametrize(("provider", "inner"), [("standin_mod", "inner.deep"), ("standin_mod:object_", "deep")])
def test_modules_inside_a_stub_can_be_imported_and_others_cannot(tree, provider, inner):
    run(
        tree,
        f"""
        import importlib, sys
        e = engine(row("t.stub", "no_such", "stub", "{provider}")); e.apply()
        assert importlib.import_module("no_such.{inner}").answer == 43
        for other in ("no_such.answer", "no_such.other", "no_such.{inner}.answer"):
            try: importlib.import_module(other)
            except ModuleNotFoundError: pass
            else: raise SystemExit(other + " was imported")
        assert state(e, "t.stub") == "active"
        e.revert()
        assert not [name for name in sys.modules if name.startswith("no_such")]
        broken = engine(row("t.stub", "no_such", "stub", "standin_mod:answer")); broken.apply()
        try: import no_such
        except Exception as error: assert "is no module" in str(error), error
        else: raise SystemExit("a number was imported")
    """,
    )


def test_every_kind_of_target(tree):
    run(
        tree,
        """
        rows = [row("t.plain", "up.base:Thing.plain", provider="ours:louder"),
                row("t.st", "up.base:Thing.st", provider="ours:louder"),
                row("t.cl", "up.base:Thing.cl", provider="ours:louder_class"),
                row("t.prop", "up.base:Thing.prop", provider="ours:louder"),
                row("t.value", "up.base:NOTHING", "replace", "ours:VALUE"),
                row("t.new", "up.base:added", "extend", "ours:VALUE"),
                row("t.reg", "up.base:TABLE", "register", "ours:entries"),
                row("t.stub", "no_such_package", "stub", "standin_mod")]
        e = engine(*rows); e.apply()
        import up.base as b, ours
        t = b.Thing()
        assert (t.plain(), t.st("x"), b.Thing.st("y"), b.Thing.cl(), t.prop) == ("plain!", "x!", "y!", "Thing!", "1!")
        assert b.NOTHING is ours.VALUE and b.added is ours.VALUE and b.TABLE == {"a": 1, "b": 2}
        import no_such_package
        assert no_such_package.answer == 42
        e.verify("worker")
        e.revert()
        assert (t.plain(), t.st("x"), b.Thing.cl(), t.prop) == ("plain", "x", "Thing", 1)
        assert b.NOTHING is None and not hasattr(b, "added") and b.TABLE == {"a": 1}
        try: import no_such_package
        except ModuleNotFoundError: pass
        else: raise SystemExit("stand-in survived revert")
    """,
    )


def test_target_that_is_half_built_waits(tree):
    (tree / "ours_prelude.py").write_text(
        "import __main__, up.worker\n"
        "__main__.e = __main__.engine(__main__.row('t.work', 'up.worker:work', provider='ours:louder'))\n"
        "__main__.e.apply()\n__main__.early = __main__.state(__main__.e, 't.work')\n"
    )
    run(
        tree,
        """
        import up.worker
        assert early == "waiting", early
        assert up.worker.work() == "1!" and state(e, "t.work") == "active"
    """,
    )


def test_failed_provider_fails_again_and_leaves_no_unpatched_module(tree):
    run(
        tree,
        """
        e = engine(row("t.bad", "up.base:f", provider="ours:bad"),
                   row("t.st", "up.base:Thing.st", provider="ours:louder"))
        e.apply()
        for _ in range(2):
            try: import up.base
            except ImportError: raise SystemExit("upstream would swallow an ImportError")
            except RuntimeError as error: assert "t.bad" in str(error) and "no such thing" in str(error)
            else: raise SystemExit("second import succeeded unpatched")
            assert "up.base" not in sys.modules
    """,
    )


def test_missing_and_existing_names_are_refused(tree):
    run(
        tree,
        """
        for bad in (row("t.gone", "up.base:gone"), row("t.there", "up.base:f", "extend", "ours:VALUE")):
            e = engine(bad); e.apply()
            try: import up.base
            except PatchError as error: assert "up.base:" in str(error)
            else: raise SystemExit("accepted")
            e.revert()
    """,
    )


def test_overridden_is_seen_and_refused(tree):
    run(
        tree,
        """
        e = engine(F); e.apply()
        import up.user, up.base
        theirs = lambda x: 0
        up.base.f = theirs
        assert state(e) == "overridden"
        try: e.verify("worker")
        except PatchError as error: assert "t.f is overridden" in str(error)
        else: raise SystemExit("not seen")
        e.revert()
        assert up.base.f is theirs and up.user.use() == 2
    """,
    )


def test_binding_held_by_another_object_is_seen(tree):
    run(
        tree,
        """
        e = engine(F); e.apply()
        import up.user
        up.user.f = lambda x: 0
        assert state(e) == "overridden"
    """,
    )


def test_waiting_row_fails_verify_only_in_its_own_process(tree):
    run(
        tree,
        """
        e = engine(row("t.f", "up.base:f", processes=frozenset({"worker"}))); e.apply()
        e.verify("controller")
        try: e.verify("worker")
        except PatchError as error: assert "t.f is waiting" in str(error)
        else: raise SystemExit("not seen")
    """,
    )


def test_drifted_body_stops_the_import(tree):
    run(
        tree,
        """
        from verl_patches.patching import fingerprint
        known = fingerprint.fingerprint("up.base:f")
        fingerprint.reviewed_hash = lambda line, target: known if target == "up.base:f" else None
        e = engine(F); e.apply()
        import up.base; assert state(e) == "active"
        e.revert(); del sys.modules["up.base"]
        import pathlib; p = pathlib.Path(up.base.__file__); p.write_text(p.read_text().replace("x + 1", "x + 2"))
        e.apply()
        try: import up.base
        except PatchError as error: assert known in str(error) and "t.f" in str(error)
        else: raise SystemExit("drift not seen")
    """,
    )


def test_digest_follows_intent_and_not_process(tree):
    code = "print(engine(F, text={!r}).digest())"
    on, off = run(tree, code.format("")), run(tree, code.format("-t.f"))
    assert on == run(tree, "import up.base\n" + code.format("")) and on != off
    target = tree / "up" / "base.py"
    target.write_text(target.read_text().replace("x + 1", "x + 1  # a comment"))
    assert run(tree, code.format("")) == on
    target.write_text(target.read_text().replace("x + 1", "x + 2"))
    assert run(tree, code.format("")) != on


def row(name, **more):
    fields = dict(stage="model", target="a.b:c", kind="wrap", provider="d:e", why="w", exit="x")
    return PatchSpec(id=name, **{**fields, **more})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a.b"), row("a.b")], "is used 2 times"),
        ([row("A b")], "id must look like"),
        ([row("a.b", kind="steal")], "kind is 'steal'"),
        ([row("a.b", target="a b:c")], "not of the form"),
        ([row("a.b", target="a.b")], "target without ':'"),
        ([row("a.b", needs=("x.y",))], "which is no row"),
        ([row("a.b", needs=("a.c",)), row("a.c", needs=("a.b",))], "cycle: a.b -> a.c -> a.b"),
        ([row("a.b", platforms=frozenset({"tpu"}))], "platforms is"),
        ([row("a.b", why="")], "must not be empty"),
    ],
)
def test_faulty_catalogues_are_refused(rows, words):
    with pytest.raises(ConfigError, match="nothing was applied") as error:
        validate(rows)
    assert words in str(error.value)


def test_needs_follow_the_switches():
    rows = [row("a.b", needs=("a.c",)), row("a.c", target="a:c")]
    Engine(rows, CPU)
    with pytest.raises(ConfigError, match="needs a.c, which is off"):
        Engine(rows, parse("line=pypi,platform=cpu,-a.c"))


def test_switch_text_round_trip_and_errors():
    text = "line=pypi,platform=cpu,-reshard.*,+a.b"
    assert parse(text).text() == text
    for bad in ("platform=tpu", "nonsense", "+", "line", "line=pypi,line=a3", "line=a3,line=a3"):
        with pytest.raises(ConfigError, match="VERL_PATCHES"):
            parse(bad)
    with pytest.raises(ConfigError, match="nearest: a.bcd"):
        Engine([row("a.bcd")], parse("line=pypi,platform=cpu,-a.bce"))


def test_later_pattern_wins_and_platform_cannot_be_switched_on():
    engine = Engine(
        [row("a.b"), row("a.c", target="a:c"), row("a.npu", target="a:d", platforms=frozenset({"npu"}))],
        parse("line=pypi,platform=cpu,-a.*,+a.c,+a.npu"),
    )
    assert engine.wanted == {"a.c"}
