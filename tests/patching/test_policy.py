"""What happens where upstream is not as reviewed (drift=strict, warn, skip), and where a provider of ours fails."""

import json
import textwrap

import pytest

from verl_patches.errors import ConfigError
from verl_patches.patching.spec import PatchSpec, validate
from verl_patches.patching.switches import Switches, parse

UP = """
def f(x): return x
def g(x): return x
class Thing:
    def m(self): return "m"
CONSTANT = 1
"""
OURS = """
def louder(original): return lambda *a: f"{original(*a)}!"
def nothing(original): return None
def same(original): return original
def bad(original): raise ImportError("no such thing")
def no_entries(): return [1]
def entries(): return {"a": 1}
def exits(original): raise SystemExit(3)
"""
PREAMBLE = """
import json, logging, sys
from verl_patches.patching import fingerprint
from verl_patches.patching.engine import Engine, PatchError
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import parse
warnings = []
class Keep(logging.Handler):
    def emit(self, record): warnings.append(record.getMessage())
logging.getLogger("verl_patches").addHandler(Keep(logging.WARNING))
fingerprint.reviewed_hash = lambda line, target: "0" * 16 if target in DRIFTED else None
def row(id, target, kind="wrap", provider="ours:louder", **more):
    return PatchSpec(id=id, stage="model", target=target, kind=kind, provider=provider, why="test", exit="no", **more)
def tried(action):
    try: action()
    except (PatchError, ImportError) as error: return f"{type(error).__name__}: {error}"
def states(e): return {s["id"]: s["state"] for s in e.status()}
def reason(e, id): return next(s["reason"] for s in e.status() if s["id"] == id)
"""


@pytest.fixture
def play(run_python, tmp_path):
    """play(code, drifted=targets) -> what the code put into `out`"""
    (tmp_path / "up.py").write_text(UP)
    (tmp_path / "other.py").write_text("def h(x): return x\n")
    (tmp_path / "ours.py").write_text(OURS)

    def run(code, drifted=()):
        text = f"DRIFTED = {drifted!r}\n{PREAMBLE}{textwrap.dedent(code)}\nprint(json.dumps(out))"
        return json.loads(run_python(text, env={"PYTHONPATH": str(tmp_path)}).check().out)

    return run


ONE = """
e = Engine([row("t.f", {target!r}, {kind!r}), row("t.g", "up:g")], parse("line=pypi,platform=cpu,drift={policy}"))
e.apply()
first = tried(lambda: __import__("up"))
second = tried(lambda: __import__("up"))
up = sys.modules.get("up")
out = dict(first=first, second=second, states=states(e), reason=reason(e, "t.f"), warnings=warnings,
           proof=tried(lambda: e.verify("worker")), seen=up and [up.f(1), up.g(1)])
"""


def test_strict_stops_at_a_drifted_body_and_leaves_nothing_imported(play):
    out = play(ONE.format(target="up:f", kind="wrap", policy="strict"), ("up:f",))
    assert out["first"].startswith("PatchError: row t.f: up:f has drifted") and out["second"] == out["first"]
    assert [word for word in ("--write", "drift=skip", "-t.f", "up.py") if word not in out["first"]] == []
    assert out["seen"] is None and out["states"] == {"t.f": "drifted", "t.g": "waiting"}
    assert "t.f is drifted" in out["proof"]


def test_warn_applies_a_drifted_row_and_says_so(play):
    out = play(ONE.format(target="up:f", kind="wrap", policy="warn"), ("up:f",))
    assert out["first"] is None and out["proof"] is None and out["seen"] == ["1!", "1!"]
    assert out["states"] == {"t.f": "drifted", "t.g": "active"} and "expected 0000000000000000" in out["reason"]
    assert len(out["warnings"]) == 1 and "t.f is drifted" in out["warnings"][0] and "drift=warn" in out["warnings"][0]


def test_skip_leaves_a_drifted_row_alone_and_says_so(play):
    out = play(ONE.format(target="up:f", kind="wrap", policy="skip"), ("up:f",))
    assert out["first"] is None and out["proof"] is None and out["seen"] == [1, "1!"]
    assert out["states"] == {"t.f": "drifted", "t.g": "active"} and "not applied" in out["warnings"][0]


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("up:gone", "wrap", "up:gone does not exist"),
        ("up:Thing", "extend", "up:Thing exists already"),
        ("up:Gone.m", "wrap", "has no 'Gone' on the way"),
        ("up:CONSTANT.m", "extend", "no attributes of its own"),
        ("up:CONSTANT", "register", "takes no entries"),
        ("up:f.__code__.co_name", "replace", "cannot be replaced"),
    ],
)
def test_a_place_that_upstream_lacks_is_unsupported(play, target, kind, words):
    strict = play(ONE.format(target=target, kind=kind, policy="strict"))
    assert words in strict["first"] and strict["second"] == strict["first"] and strict["states"]["t.f"] == "unsupported"
    assert strict["seen"] is None


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_other_policies_leave_an_unsupported_row_alone(play, policy):
    out = play(ONE.format(target="up:gone", kind="wrap", policy=policy))
    assert out["first"] is None and out["proof"] is None and out["seen"] == [1, "1!"]
    assert out["states"] == {"t.f": "unsupported", "t.g": "active"}
    assert len(out["warnings"]) == 1 and "does not exist" in out["warnings"][0]


@pytest.mark.parametrize(
    ("provider", "kind", "words"),
    [
        ("ours:bad", "wrap", "ImportError: no such thing"),
        ("ours:gone", "wrap", "has no 'gone'"),
        ("no_such_module:f", "replace", "No module named 'no_such_module'"),
        ("ours:nothing", "wrap", "must return a callable"),
        ("ours:same", "wrap", "returned the original"),
        ("ours:no_entries", "register", "must return a dict"),
    ],
)
@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_a_provider_that_fails_always_stops(play, provider, kind, words, policy):
    target = "up:__dict__" if kind == "register" else "up:f"
    out = play(f"""
        e = Engine([row("t.f", {target!r}, {kind!r}, {provider!r})], parse("line=pypi,platform=cpu,drift={policy}"))
        e.apply()
        out = dict(first=tried(lambda: __import__("up")), second=tried(lambda: __import__("up")), states=states(e),
                   proof=tried(lambda: e.verify("worker")), there="up" in sys.modules)
    """)
    assert words in out["first"] and out["second"] == out["first"] and out["first"].startswith("PatchError: row t.f:")
    assert out["states"] == {"t.f": "failed"} and "t.f is failed" in out["proof"] and not out["there"]


def test_a_provider_that_exits_leaves_nothing_unpatched(play):
    out = play("""
        e = Engine([row("t.f", "up:f", provider="ours:exits")], parse("line=pypi,platform=cpu"))
        e.apply()
        def leave():
            try: import up
            except SystemExit as error: raise PatchError(error.code)
        out = [tried(leave), tried(leave), "up" in sys.modules, states(e)]
    """)
    assert out == ["PatchError: 3", "PatchError: 3", False, {"t.f": "waiting"}]


def test_states_after_two_imports_that_failed_for_different_rows(play):
    out = play("""
        import ours
        e = Engine([row("t.f", "up:f"), row("t.g", "up:g", provider="ours:bad")], parse("line=pypi,platform=cpu"))
        e.apply()
        out = [tried(lambda: __import__("up")), states(e)]
        ours.louder = ours.bad
        out += [tried(lambda: __import__("up")), states(e)]
    """)
    assert "row t.g" in out[0] and out[1] == {"t.f": "waiting", "t.g": "failed"}
    assert "row t.f" in out[2] and out[3] == {"t.f": "failed", "t.g": "failed"}


def test_apply_after_the_import_fails_each_time(play):
    out = play("""
        import up
        e = Engine([row("t.f", "up:f", provider="ours:bad")], parse("line=pypi,platform=cpu"))
        out = [tried(e.apply), tried(e.apply), states(e)]
    """)
    assert "t.f" in out[0] and out[0] == out[1] and out[2] == {"t.f": "failed"}


@pytest.mark.parametrize("order", ["import other, up", "import up, other"])
def test_rows_that_need_a_skipped_one_are_skipped_in_any_order_of_imports(play, order):
    out = play(
        f"""
        rows = [row("t.low", "up:f"), row("t.mid", "other:h", needs=("t.low",)),
                row("t.over", "other:h", needs=("t.mid",)), row("t.top", "up:g", needs=("t.over",)),
                row("t.else", "up:Thing.m")]
        e = Engine(rows, parse("line=pypi,platform=cpu,drift=skip"))
        e.apply(); e.apply()
        {order}
        def seen(): return [up.f(1), other.h(1), up.g(1), up.Thing().m()]
        out = [states(e), reason(e, "t.top"), seen(), tried(lambda: e.verify("worker"))]
        e.apply(); e.revert()
        out += [seen(), states(e)]
    """,
        ("up:f",),
    )
    states = {"t.low": "drifted", **dict.fromkeys(("t.mid", "t.over", "t.top"), "unsupported"), "t.else": "active"}
    assert out[:2] == [states, "it needs t.over, which is unsupported and was not applied"]
    assert out[2] == [1, 1, 1, "m!"] and out[3] is None
    assert out[4] == [1, 1, 1, "m"] and set(out[5].values()) == {"reverted"}


def test_an_applied_drifted_row_that_is_overridden_is_refused(play):
    out = play(
        """
        e = Engine([row("t.f", "up:f")], parse("line=pypi,platform=cpu,drift=warn")); e.apply()
        import up
        before, up.f = tried(lambda: e.verify("worker")), print
        out = [before, states(e), tried(lambda: e.verify("worker"))]
    """,
        ("up:f",),
    )
    assert out[0] is None and out[1] == {"t.f": "overridden"} and "builtins.print" in out[2]


def row(name, **more):
    fields = dict(stage="model", target="a.b:c", kind="wrap", provider="d:e", why="w", exit="x")
    return PatchSpec(id=name, **{**fields, **more})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a.b"), row("a.c")], "rows 'a.b' and 'a.c' are both on a.b:c: the one that goes over the other must"),
        ([row("a.b"), row("a.c", kind="replace", needs=("a.b",))], "must be a wrap and name it in needs"),
        ([row("a.b"), row("a.c", needs=("a.b",), bindings=("m:c",))], "must list the same bindings"),
        ([row("a.b", bindings=("m:c",)), row("a.c", target="m:c")], "its binding m:c is the target of row 'a.c'"),
        (
            [row("a.b", target="m:C"), row("a.c", target="m:C.m")],
            "row 'a.c' is on m:C.m, inside m:C of row 'a.b': one must name the other in needs",
        ),
        (
            [row("a.c", target="m:C.D.m"), row("a.b", target="m:C", kind="replace", needs=("a.c",))],
            "row 'a.b' replaces m:C, over m:C.D.m of row 'a.c': it must be a wrap",
        ),
        (
            [row("a.b", target="m:C"), row("a.c", target="m:C.TABLE", kind="register")],
            "row 'a.c' is on m:C.TABLE, inside",
        ),
        (
            [row("a.b"), row("a.c", target="m", kind="stub", provider="o", needs=("a.b",))],
            "a module stub can need no row",
        ),
        ([row("a.b", needs=("a.b",))], "needs form a cycle: a.b -> a.b"),
        (
            [row("a.b", needs=("a.d",)), row("a.c", needs=("a.b",)), row("a.d", needs=("a.c",))],
            "a.b -> a.d -> a.c -> a.b",
        ),
    ],
)
def test_rows_on_one_place_whose_order_is_not_known_are_refused(rows, words):
    with pytest.raises(ConfigError) as error:
        validate(rows)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "rows",
    [
        [row("a.b"), row("a.c", needs=("a.b",))],
        [row("a.c", needs=("a.b",)), row("a.b", kind="replace")],  # the order of the table does not matter
        [row("a.b"), row("a.c", needs=("a.b",)), row("a.d", needs=("a.c",))],
        [row("a.b", lines=frozenset({"pypi"})), row("a.c", lines=frozenset({"a3"}))],
        [row("a.b", platforms=frozenset({"cpu"})), row("a.c", platforms=frozenset({"npu"}))],
        [row("a.b", kind="register"), row("a.c", kind="register")],
        [row("a.b", target="m:C", kind="replace"), row("a.c", target="m:C.m", kind="replace", needs=("a.b",))],
        [row("a.b", target="m:C", needs=("a.c",)), row("a.c", target="m:C.m", bindings=("o:m",))],
        [row("a.b", target="m:C"), row("a.c", target="m:Cs.m"), row("a.d", target="n:C.m")],
        [row("a.b", target="m", kind="stub", provider="o"), row("a.c", target="m.n:f")],
    ],
)
def test_rows_on_one_place_that_cannot_clash_are_fine(rows):
    assert list(validate(rows)) == [r.id for r in rows]


def test_the_policy_is_part_of_the_switch_text_only_when_it_is_not_the_default():
    assert Switches("pypi", "cpu").text() == "line=pypi,platform=cpu"
    for policy in ("warn", "skip"):
        text = f"line=pypi,platform=cpu,drift={policy},-a.b"
        assert parse(text).text() == text and parse(text).drift == policy
    assert parse("drift=strict").drift == Switches().drift == "strict"
    with pytest.raises(ConfigError, match=r"drift=strict\|warn\|skip"):
        parse("drift=ignore")
