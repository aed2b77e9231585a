"""Measure how often recorded and own experts agree when the weights have changed since the record. Run by hand:

    python tests/benchmarks/routing_replay.py [--steps 3]

It makes a smoke run in bf16 with recipe.train.routing_replay=R2, two mini batches and two epochs at a high learning
rate. Prints JSON; exits 1 if all experts agree, so that nothing was measured. Takes about two minutes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile

from report import argument_parser, figure, print_report, run_smoke

ACTOR = "actor_rollout_ref.actor"
DRIFT = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=1e-3")


def main() -> int:
    """Run and print the report."""
    given = argument_parser(__doc__, steps=3).parse_args()
    options = ("--steps", str(given.steps), "--dtype", "bf16", "recipe.logprob_check.action=report")
    with tempfile.TemporaryDirectory() as folder:
        steps = run_smoke(folder, "r2", *options, "recipe.train.routing_replay=R2", *DRIFT)["steps"]
    agreement = [step["routing_replay"]["agreement"] for step in steps]
    by_step = {"by step": [round(share, 5) for share in agreement]}
    held = max(step["routing_replay"]["bytes"] for step in steps)
    large = {"671B, MiB of 1,024 samples of 4,096 tokens, 8 layers a stage": 1024 * 4096 * 8 * 8 >> 20}
    figures = [
        figure("agreement", round(statistics.mean(agreement), 5), "share", 0.999, by_step),
        figure("record of a rank", held, "bytes", None, large),
    ]
    return print_report("routing_replay", figures)


if __name__ == "__main__":
    sys.exit(main())
