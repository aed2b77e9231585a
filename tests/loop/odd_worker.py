"""Worker set-up hooks that make rank 1 another process than the rest: it must be refused before step 1."""

import os

from verl_patches.patching import engine


def other_switches():
    """Rank 1 runs with one row switched off."""
    if os.environ.get("RANK") == "1":
        from verl_patches.catalog import ROWS
        from verl_patches.patching.switches import parse

        text = engine.current().switches.text()
        engine.current().revert()
        engine._CURRENT = None
        engine.start(ROWS, parse(f"{text},-reshard.switch")).apply()


def no_patches():
    """Rank 1 takes our weight-sync row out again: what it means is unchanged, what it does is not."""
    if os.environ.get("RANK") == "1":
        row = engine.current()._rows["reshard.switch"]
        row.state = "reverted"
