#!/usr/bin/env bash
# GRPO of DeepSeek-V3 671B on 256 dies (16 Atlas A3 nodes): DeepSeek-V3's own weights: the run that learns.
#
#   bash scripts/train_deepseekv3_256die_true_weight.sh --dry-run     # check and print ranks, groups, patches, environment, commands
#   bash scripts/train_deepseekv3_256die_true_weight.sh               # join the Ray on the nodes, and train
#   ... --upstream DIR         # the line's sources, if PYTHONPATH has them not; scripts/fetch_upstream.sh --dest DIR brings them
#   ... actor_rollout_ref.rollout.n=8 trainer.total_training_steps=10         # any Hydra override; --help lists the options
#
# Before a real start: data in ./data/deepscaler, the model in ./DeepSeek-V3-hf, and Ray on every node (--dry-run prints the
# ray commands). Run it where Ray's head runs. The exit code is the run's own. Everything else: configs/deepseekv3_256die_true_weight.yaml.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3 # an NPU image brings its own
"$python" -c "import typer, hydra" 2>/dev/null || {
    echo "$0: $python lacks what the recipe needs; run: bash scripts/setup.sh, or on an NPU image: pip install -r requirements.txt" >&2
    exit 2
}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m verl_patches train --config-name deepseekv3_256die_true_weight "$@"
