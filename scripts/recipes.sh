#!/usr/bin/env bash
# Set up what is missing, then run every algorithm preset of configs/algo for 3 steps, the learning runs and the chains of commands
# (scripts/chains.py), and record each result in docs/recipes.json, the source of the tables of docs/recipes.md.
#
#   bash scripts/recipes.sh [--upstream DIR] [--only NAME] [--where pypi|a3|emulated|learning|chains]
#
#   --upstream DIR  folder with the clones of scripts/fetch_upstream.sh: also run line a3, on CPU and on the emulated device
#   --only NAME     run only this preset or chain; can be repeated
#   --where PLACE   make only this kind of run; can be repeated (default: all; a3 and emulated only with --upstream)
#
# Runs take 1 to 3 minutes each, chains 3 to 5, one after the other. The exit code is 1 if a run fails without being refused, or
# learns less than is stated (LEARNING in recipe_runs.py, CHAINS in chains.py). Runs are kept in outputs/recipe_NAME_PLACE, the
# files of a chain in outputs/chain_NAME. Records of presets that are not run are kept. This runs scripts/recipe_runs.py.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh" >&2
exec "$root/.venv/bin/python" "$root/scripts/recipe_runs.py" "$@" </dev/null
