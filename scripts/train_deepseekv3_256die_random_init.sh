#!/usr/bin/env bash
# Train DeepSeek-V3 671B by GRPO on 256 dies (16 Atlas A3 nodes) with random weights, forced 3K responses and balanced experts, to
# measure speed and memory.
#
#   bash scripts/train_deepseekv3_256die_random_init.sh --dry-run     # check, and print memory, seconds and the next command; --all: everything
#   bash scripts/train_deepseekv3_256die_random_init.sh               # join the Ray cluster of the nodes, and train
#   ... --upstream DIR         # the line's sources, unless they are on PYTHONPATH; fetch them with scripts/fetch_upstream.sh --dest DIR
#   ... actor_rollout_ref.rollout.n=8 trainer.total_training_steps=10         # any Hydra override; --help lists the options
#
# Before a real start, put the data in ./data/deepscaler and the model in ./DeepSeek-V3-hf, and start Ray on every node (--dry-run --all
# prints the ray commands). Run it on the node of Ray's head. It exits with the run's exit code. All settings: configs/deepseekv3_256die_random_init.yaml.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3 # an NPU image has its own
"$python" -c "import typer, hydra" 2>/dev/null || {
    echo "$0: $python lacks required packages; run: bash scripts/setup.sh, or on an NPU image: pip install -r requirements.txt" >&2
    exit 2
}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m verl_patches train --config-name deepseekv3_256die_random_init "$@"
