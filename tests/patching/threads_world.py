"""Call apply, import, status and revert from many threads at once; run as a program, which ends at a deadlock.

    python threads_world.py FOLDER storm | crossed | crossed-naive | late | late-naive | stored-original | stored-lower

storm: fresh packages, eight threads each. crossed: one thread is inside the import of a module whose hook needs the
engine, while another one inside apply() imports a provider that imports that module. late: a patch is applied after
another thread has asked the finders for its module. stored: a module fetches an object (the original, or the lower of
our two patches) before our patches are in place and stores it afterwards, at the end of its import. The naive variants
are negative controls: the engine installs under its lock, or hooks do not wait for a running import. A deadlock exits 1
with all stacks on stderr. Events, not times, bring the threads to the critical place, so a busy machine changes
nothing.
"""

import faulthandler
import logging
import sys
import threading
from functools import partial
from pathlib import Path

from tests.patching.world import row, write
from verl_patches.patching import hooks
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches

WRAP = "def louder(original):\n    return lambda *a, **k: f'{original(*a, **k)}!'\n"


def engine(*rows):
    return Engine(rows, Switches("pypi", "cpu"))


def run_all(*works):
    """Run functions in threads that start together; the first error is raised."""
    errors, gate = [], threading.Barrier(len(works))

    def run(work):
        gate.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def storm(folder, number):
    """Do everything at once; afterwards every patch must be active everywhere.

    No provider imports a module that another thread imports and that needs the target: for such a circle Python itself
    raises a _DeadlockError in one thread, as for any import.
    """
    up = f"up{number}"
    write(
        folder,
        up,
        base="def f(x): return x\ndef g(x): return x\n",
        user=f"from {up}.base import f\n",
        other=f"import time; time.sleep(0.001)\nimport {up}.base\ndef h(x): return x\n",
        ours=f"import time\ntime.sleep(0.001)\n{WRAP}",
        ours_of_other=WRAP,
    )
    ours, bindings = f"{up}.ours:louder", (f"{up}.user:f",)
    e = engine(
        row("t.f", f"{up}.base:f", provider=ours, bindings=bindings),
        row("t.over", f"{up}.base:f", provider=ours, bindings=bindings, needs=("t.f",)),
        row("t.g", f"{up}.base:g", provider=ours),
        row("t.h", f"{up}.other:h", provider=f"{up}.ours_of_other:louder"),
    )

    look, imports = look_any(e, "off", "waiting", "active"), [f"{up}.{name}" for name in ("base", "user", "other")]
    run_all(e.apply, e.apply, e.apply, look, look, *(partial(__import__, name) for name in imports))
    e.verify("worker")
    base, user, other = (sys.modules[name] for name in imports)
    seen = [base.f(1), user.f(1), base.g(1), other.h(1)]
    assert seen == ["1!!", "1!!", "1!", "1!"], seen
    look = look_any(e, "waiting", "active", "reverted")
    run_all(e.revert, look, e.apply, e.revert, look, e.apply)
    e.revert()
    assert [base.f(1), user.f(1), base.g(1), other.h(1)] == [1, 1, 1, 1]
    e.apply()
    e.verify("worker")
    assert user.f(1) == "1!!"


def look_any(e, *allowed):
    """Return a function that reads status() while patches come and go."""

    def look():
        for _ in range(20):
            assert {row["state"] for row in e.status()} <= set(allowed)

    return look


def crossed(folder, naive):
    """Run apply() into a provider that imports up.slow while the hook of up.slow is about to enter the engine."""
    main = sys.modules["__main__"]
    main.importing, main.inside, main.hooked = threading.Event(), threading.Event(), threading.Event()
    main.crossed = lambda: naive and faulthandler.dump_traceback_later(3, exit=True)  # from here on it hangs
    write(
        folder,
        "up",
        base="def f(x): return x\n",
        ours=WRAP,
        slow="import __main__\n__main__.importing.set()\n__main__.inside.wait()\ndef h(x): return x\n",
        ours_slow="import __main__\n__main__.inside.set()\n__main__.hooked.wait()\n__main__.crossed()\n"
        f"import up.slow\n{WRAP}",
    )
    __import__("up.base")
    slow = row("t.h", "up.slow:h", provider="up.ours:louder")
    e = engine(slow, row("t.f", provider="up.ours_slow:louder"))
    install = Engine._install

    def seen(self, row, nth, module):
        if module.__name__ == "up.slow":
            main.hooked.set()
        if not naive:
            return install(self, row, nth, module)
        with self._lock:  # the simple design, which deadlocks
            return install(self, row, nth, module)

    def late_apply():
        main.importing.wait()
        e.apply()

    Engine._install = seen
    run_all(lambda: __import__("up.slow"), late_apply)
    e.verify("worker")


def late(folder, naive):
    """Ask the finder of up.late before apply(); it answers when apply() waits for it, or (naive) has ended."""
    write(folder, "up", late="def f(x): return x\n", ours=WRAP)
    asked, go_on = threading.Event(), threading.Event()

    class Slow:
        def find_spec(self, name, path=None, target=None):
            if name == "up.late" and threading.current_thread() is not threading.main_thread():
                asked.set()
                go_on.wait()

    hooks.after_import("up.unrelated", print)  # wrapt's finder is there, as after any prelude
    sys.meta_path.insert(1, Slow())  # behind wrapt's finder, before the one that finds
    e = engine(row("t.f", "up.late:f", provider="up.ours:louder"))
    importer = threading.Thread(target=lambda: __import__("up.late"))
    importer.start()
    asked.wait()
    wait_for_import = hooks._lock_unlock_module
    hooks._lock_unlock_module = lambda name: naive or go_on.set() or wait_for_import(name)
    e.apply()
    assert go_on.is_set() != naive
    go_on.set()
    importer.join()
    e.verify("worker")
    assert sys.modules["up.late"].f(1) == "1!"


def stored(folder, what):
    """Let up.user fetch up.base.f before both patches or between them, and store it once both are in place."""
    main = sys.modules["__main__"]
    main.fetched, main.store = threading.Event(), threading.Event()
    importer = threading.Thread(target=lambda: __import__("up.user"))
    write(
        folder,
        "up",
        base="def f(x): return x\n",
        user="import __main__\nfrom up.base import f as fetched\n"
        "__main__.fetched.set()\n__main__.store.wait()\nf = fetched\n",
        ours=f"import __main__\n{WRAP}def over(original):\n    __main__.between()\n    return louder(original)\n",
    )
    __import__("up.base")
    lower = row("t.f", provider="up.ours:louder", bindings=("up.user:f",))
    e = engine(lower, row("t.over", provider="up.ours:over", bindings=("up.user:f",), needs=("t.f",)))

    def begin_import():
        importer.start()
        main.fetched.wait()

    def in_place(record):
        """Act when the log reports that a patch is in place, before its bindings are checked again."""
        if what == "original" and record.args[0] == "t.f":
            run_all(e.apply)  # another thread puts the upper row in place
        if record.args[0] == {"original": "t.f", "lower": "t.over"}[what]:
            main.store.set()
            importer.join()
            assert {row["state"] for row in e.status()} == {"active"}, e.status()
        return True

    log = logging.getLogger("verl_patches.patching.row")
    log.setLevel(logging.DEBUG)
    log.addFilter(in_place)
    main.between = begin_import if what == "lower" else lambda: None
    if what == "original":
        begin_import()
    e.apply()
    e.verify("worker")
    assert sys.modules["up.user"].f(1) == "1!!"


def main(folder, world):
    faulthandler.dump_traceback_later(500, exit=True)
    sys.setswitchinterval(1e-5)
    sys.path.insert(0, folder)
    if world == "storm":
        for number in range(40):
            storm(Path(folder), number)
    elif world.startswith("stored-"):
        stored(Path(folder), world.partition("-")[2])
    else:
        {"crossed": crossed, "late": late}[world.partition("-")[0]](Path(folder), "naive" in world)


if __name__ == "__main__":
    main(*sys.argv[1:])
