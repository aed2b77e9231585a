#!/usr/bin/env bash
# Set up what is missing, then run GRPO on a tiny DeepSeek-V3 on this machine's CPU: the whole loop, real, small.
#
#   bash scripts/smoke.sh [options] [hydra overrides]      bash scripts/smoke.sh --help lists them
#   bash scripts/smoke.sh --line a3 --upstream DIR         with production's sources, which scripts/fetch_upstream.sh brings
#
# The only thing done here is the set-up; everything else is `python -m verl_patches smoke`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh" >&2 # standard output is the run's own (--json)
exec "$root/.venv/bin/python" -m verl_patches smoke "$@"
