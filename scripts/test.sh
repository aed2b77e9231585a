#!/usr/bin/env bash
# Set up what is missing, then run the tests.
#
#   bash scripts/test.sh [--full | --nightly] [--upstream DIR] [--venv DIR] [pytest arguments]
#
#                   without: the quick tests (up to 8 minutes on two cores)
#   --full          also those marked slow: whole runs, layouts, kills; what each submission runs (up to 40 minutes)
#   --nightly       all, also those marked nightly: learning runs, more controls, lost nodes (up to 150 minutes)
#   --upstream DIR  folder with git clones of verl, Megatron-LM, ...: also the tests that read upstream sources
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
            # one word, =: pytest takes the folder for where the tests are otherwise
            if [ "$1" = --venv ]; then venv=$(absolute "$2"); else args+=("--upstream=$(absolute "$2")"); fi
            shift 2 ;;
        *) args+=("$1"); shift ;;
    esac
done
bash "$root/scripts/setup.sh" --venv "$venv"
cd "$root"
# two at once: most of a loop run's time is start-up on one core; tests of one file stay together, in the order of
# tests/conftest.py: the long ones first, so that none of them is alone at the end
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${args[@]}" </dev/null
