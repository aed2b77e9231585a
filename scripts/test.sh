#!/usr/bin/env bash
# Set up what is missing, then run the tests.
#
#   bash scripts/test.sh [--full | --nightly] [--upstream DIR] [--venv DIR] [pytest arguments]
#
#                   without options: run the quick tests (up to 8 minutes on two cores)
#   --full          also run those marked slow, as each submission does: whole runs, layouts, kills (up to 40 minutes)
#   --nightly       run all tests, also those marked nightly: learning runs, more controls, lost nodes (up to 150 minutes)
#   --upstream DIR  folder with git clones of verl, Megatron-LM, ...: also run the tests that read upstream sources
#   --venv DIR      environment to use or make (default: .venv)
#   e.g. bash scripts/test.sh tests/reshard -k plan
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv args=()
absolute() { case $1 in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$PWD" "$1" ;; esac; }
while [ $# -gt 0 ]; do
    case $1 in
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --venv|--upstream)
            [ $# -ge 2 ] || { echo "[test] error: $1 needs a folder; see --help" >&2; exit 2; }
            # one word with =: otherwise pytest takes the folder for one of tests
            if [ "$1" = --venv ]; then venv=$(absolute "$2"); else args+=("--upstream=$(absolute "$2")"); fi
            shift 2 ;;
        *) args+=("$1"); shift ;;
    esac
done
bash "$root/scripts/setup.sh" --venv "$venv"
cd "$root"
# run two at once, as a loop run starts up on one core for most of its time; tests of one file stay together, in the
# order of tests/conftest.py, which runs the longest first
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${args[@]}" </dev/null
