"""Agreement of recorded and own experts, and |dlogp| with and without replay, of the same passes. Run by hand:

    python tests/benchmarks/routing_replay.py [--steps 3]

Two smoke runs in bf16, where vLLM and Megatron round differently and near experts change places:
R3, each of whose passes for old log-probs is also run without replay (recipe.train.routing_replay_control_every=1), and
R2 with two mini batches and two epochs at a high learning rate: later updates' weights are not those of the record.
Prints JSON; exits 1 where |dlogp| is not lower with replay. Takes about four minutes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile

from report import figure, parser_of, print_report, run_smoke

KEY = "recipe.train.routing_replay"
REPORT = "recipe.logprob_check.action=report"
ACTOR = "actor_rollout_ref.actor"
DRIFT = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=1e-3")


def main() -> int:
    """Run and print."""
    given = parser_of(__doc__, steps=3).parse_args()
    common = ("--steps", str(given.steps), "--dtype", "bf16", REPORT)
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            "R3": run_smoke(folder, "r3", *common, f"{KEY}=R3", f"{KEY}_control_every=1")["steps"],
            "R2": run_smoke(folder, "r2", *common, f"{KEY}=R2", *DRIFT)["steps"],
        }
    figures = []
    for mode, found in steps.items():
        agreement = [step["routing_replay"]["agreement"] for step in found]
        peer = {"by step": [round(share, 5) for share in agreement]}
        figures.append(figure(f"{mode}: agreement", round(statistics.mean(agreement), 5), "share", None, peer))
    deltas = {
        "with replay": [step["logprob_delta"]["mean"] for step in steps["R3"]],
        "without": [step["routing_replay"]["logprob_delta_without"]["mean"] for step in steps["R3"]],
    }
    mean = {name: statistics.mean(values) for name, values in deltas.items()}
    peer = {name: [float(f"{value:.3g}") for value in values] for name, values in deltas.items()}
    figures.append(figure("R3: mean |dlogp|", mean["with replay"], "nats", mean["without"], peer))
    held = [step["routing_replay"]["bytes"] for step in steps["R3"]]
    peer = {"671B, MiB of 1,024 samples of 4,096 tokens, 8 layers a stage": 1024 * 4096 * 8 * 8 >> 20}
    figures.append(figure("R3: record of a rank", max(held), "bytes", None, peer))
    return print_report("routing_replay", figures)


if __name__ == "__main__":
    sys.exit(main())
