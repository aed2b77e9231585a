#!/usr/bin/env bash
# Set up what is missing, then run the whole GRPO loop with a tiny DeepSeek-V3 on this machine's CPU.
#
#   bash scripts/smoke.sh [options] [hydra overrides]      bash scripts/smoke.sh --help lists them
#   bash scripts/smoke.sh --line a3 --upstream DIR         with production's sources, fetched by scripts/fetch_upstream.sh
#
# This script only does the set-up; everything else is `python -m verl_patches smoke`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh" >&2 # standard output is for the run alone (--json)
exec "$root/.venv/bin/python" -m verl_patches smoke "$@"
