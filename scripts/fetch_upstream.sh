#!/usr/bin/env bash
# Clone the upstream repositories of a line at their pins, verify commits and files, insert the prelude line, run `check`.
#
#   bash scripts/fetch_upstream.sh [--line a3] [--mirror DIR-OR-URL] [--dest upstream/] [--only NAME] [--json]
#
#   --mirror DIR   a folder of git mirrors, for a cluster without network: DIR/NAME.git as `git clone --mirror` makes them,
#                  or clones DIR/NAME; then nothing else is contacted
#   --mirror URL   clones come from URL/NAME.git
#   --only NAME    one repository; can be repeated
#
# It can be interrupted and repeated. A clone that exists is verified and never changed, except for the prelude line. This runs
# `python -m verl_patches fetch-upstream`; the pins are in configs/upstream.yaml.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3 # an NPU image, or a login node with network, brings its own
"$python" -c "import typer, rich, yaml, pydantic, hydra, psutil" 2>/dev/null || {
    echo "$0: $python lacks what this needs; run: pip install -r $root/requirements.txt (or bash scripts/setup.sh)" >&2
    exit 2
}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m verl_patches fetch-upstream "$@"
