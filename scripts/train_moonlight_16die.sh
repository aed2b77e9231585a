#!/usr/bin/env bash
# Train Moonlight-16B-A3B-Instruct by GRPO on GSM8K on 16 dies (one Atlas A3 node), from its own weights.
#
#   bash scripts/train_moonlight_16die.sh --dry-run     # check, and print memory, seconds and the next command; --all: everything
#   bash scripts/train_moonlight_16die.sh               # start Ray on this node, and train
#   ... --upstream DIR         # the line's sources, unless they are on PYTHONPATH; fetch them with scripts/fetch_upstream.sh --dest DIR
#   ... algo=sft trainer.total_training_steps=10         # any Hydra override; --help lists the options
#
# Before a real start, put the data in ./outputs/data/gsm8k (data build data/gsm8k.yaml) and the model in
# ./Moonlight-16B-A3B-Instruct. It exits with the run's exit code. All settings: configs/moonlight_16die.yaml.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3 # an NPU image has its own
"$python" -c "import typer, hydra" 2>/dev/null || {
    echo "$0: $python lacks required packages; run: bash scripts/setup.sh, or on an NPU image: pip install -r requirements.txt" >&2
    exit 2
}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m verl_patches train --config-name moonlight_16die "$@"
