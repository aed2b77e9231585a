#!/usr/bin/env bash
# Set up what is missing, then run every algorithm preset of configs/algo for 3 steps, the learning runs and the chains of commands
# (scripts/chains.py), and record how each ended in docs/recipes.json, from which the table of docs/recipes.md is made.
#
#   bash scripts/recipes.sh [--upstream DIR] [--only NAME] [--where pypi|a3|emulated|learning|chains]
#
#   --upstream DIR  folder with the clones of scripts/fetch_upstream.sh: also line a3, on CPU and on the emulated device
#   --only NAME     one preset or chain; can be repeated
#   --where PLACE   one kind of run; can be repeated. Without it all, a3 and emulated only with --upstream
#
# 1 to 3 minutes a run, one after the other; the exit code is 1 where a run neither ended well nor was refused, or did not learn
# what is stated (LEARNING in recipe_runs.py, CHAINS in chains.py; a chain takes 3 to 5 minutes). Runs are kept in
# outputs/recipe_NAME_PLACE, and all that a chain makes in outputs/chain_NAME. A record of a preset that is not run stays. This runs scripts/recipe_runs.py.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh" >&2
exec "$root/.venv/bin/python" "$root/scripts/recipe_runs.py" "$@" </dev/null
