"""`python -m verl_patches`: look at the patches, prepare an upstream tree, run a smoke or a training.

Every command takes --json. Exit codes: 0 fine, 1 a problem was found, 2 wrong use.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_patches import contract_cli
from verl_patches.cluster import cli, config_cli, reshard_cli, upstream_cli
from verl_patches.cluster.show import Json, table
from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine, PatchError
from verl_patches.patching.prelude_line import PLACES

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
Switch = Annotated[str | None, typer.Option("--switches", help="As VERL_PATCHES, which it stands in for.")]


def _engine(switches: str | None) -> Engine:
    """An engine over the catalogue in this process; nothing is applied."""
    from verl_patches.catalog import ROWS
    from verl_patches.patching.switches import from_environment, parse

    return Engine(ROWS, parse(switches) if switches is not None else from_environment())


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


@app.command()
def status(
    run: Annotated[Path | None, typer.Option("--run", help="A run's folder: show the states it recorded.")] = None,
    switches: Switch = None,
    as_json: Json = False,
) -> None:
    """The rows of the catalogue and their states: of a recorded run, or what would be applied here ("waiting")."""
    if run is not None:
        from verl_patches.patching.report import WRONG, count_by_process, run_states

        rows = count_by_process(run_states(run))
        if not rows:
            raise PatchError(f"{run} recorded no states: it ended before any process was asked; see its driver.log")
        record = json.loads((run / "summary.json").read_text())
        ended, dirty = record["exit"], record.get("dirty", {})
        wrong = [r["id"] for r in rows if WRONG & set(r["states"].values())]
        if as_json:
            _print_json({"run": str(run), "exit": ended, "dirty": dirty, "rows": rows, "wrong": wrong})
        else:
            for name, files in dirty.items():
                print(f"dirty: {name} was not as pinned: {', '.join(files)}")
            print(f"run ended: {ended}. A row waits where its module was never imported in that process.")
            table(f"patches of {run}", ("id", "target", "states", "reason"),
                  [(r["id"], r["target"], ", ".join(f"{p}: {s}" for p, s in r["states"].items()), r["reason"])
                   for r in rows])
        raise typer.Exit(1 if wrong else 0)
    engine = _engine(switches)
    rows = [{**r, "state": "waiting" if r["id"] in engine.wanted else "off"} for r in engine.status()]
    if as_json:
        _print_json({"switches": engine.switches.text(), "rows": rows})
    else:
        table(f"patches for {engine.switches.text()}", ("id", "state", "target", "reason"),
              [(r["id"], r["state"], r["target"], r["reason"]) for r in rows])


@app.command()
def explain(row_id: str, switches: Switch = None, as_json: Json = False) -> None:
    """Everything about one row: what it replaces, why, by what, until when."""
    facts = _engine(switches).explain(row_id)
    drifted = facts["reviewed"] not in (None, facts["fingerprint"])
    facts["state"] = ("drifted" if drifted else "waiting") if facts["wanted"] else "off"  # nothing is applied here
    if as_json:
        _print_json(facts)
    else:
        table(row_id, ("fact", "value"), [(k, ", ".join(v) if isinstance(v, (list, tuple)) else str(v))
                                          for k, v in facts.items()])
        print(PLACES)


@app.command()
def digest(switches: Switch = None, as_json: Json = False) -> None:
    """The digest of intent that controller and workers compare before step 1."""
    engine = _engine(switches)
    if as_json:
        _print_json({"switches": engine.switches.text(), "digest": engine.digest(), "intent": engine.intent()})
    else:
        print(engine.digest())


@app.command("install-prelude")
def install_prelude(
    verl_path: Annotated[Path | None, typer.Option("--verl-path", help="A verl checkout; default: installed.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take both out again.")] = False,
    as_json: Json = False,
) -> None:
    """Insert `from verl_patches import prelude_patch` into verl's Megatron workers, and a .pth file into this Python.

    The .pth file runs the prelude in every process of this Python that imports upstream before it reaches the line.
    """
    from dataclasses import asdict

    from verl_patches.patching import prelude_pth

    found = asdict((prelude_pth.undo if undo else prelude_pth.install)(verl_path))
    if as_json:
        _print_json({name: {**result, "file": str(result["file"])} for name, result in found.items()})
        return
    for result in found.values():
        print(f"{result['state']}: {result['file']}" + (f", line {result['line']}" if result["line"] else ""))


def _rows() -> Any:
    from verl_patches.catalog import ROWS

    return ROWS


contract_cli.register(app, _engine)
cli.register(app, _rows)
config_cli.register(app)
reshard_cli.register(app)
upstream_cli.register(app, contract_cli.run_check)


def main() -> None:
    """Run the command line; a user's mistake ends with one sentence on stderr and code 2, a found problem with 1."""
    try:
        app()
    except ConfigError as error:
        print(f"verl_patches: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except PatchError as error:
        print(f"verl_patches: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
