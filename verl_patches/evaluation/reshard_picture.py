"""A picture of a reshard plan: who sends how much to whom, and each rank's bytes beside what must arrive."""

from __future__ import annotations

from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.reshard.plan import ReshardPlan

GB = 1e9


def draw_plan(plan: ReshardPlan, path: Path) -> Path:
    """Heat map of bytes from rank to rank (lines part the training stages) and bytes per rank, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6.5), layout="constrained")  # matplotlib is imported here, as in plots.py
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    image = left.imshow([[n / 1e6 for n in row] for row in plan.traffic], cmap="viridis", interpolation="nearest")
    left.set(title="MB from training rank to rollout rank", xlabel="receives", ylabel="sends")
    figure.colorbar(image, ax=left, shrink=0.85)
    ranks = range(plan.world_size)
    borders = [rank - 0.5 for rank in ranks if rank and plan.stages[rank] != plan.stages[rank - 1]]
    for border in borders:
        left.axhline(border, color="white", linewidth=0.6)
        right.axvline(border, color="0.85", linewidth=0.8)
    right.plot(ranks, [n / GB for n in plan.sent_bytes], ".", markersize=4, label="sent")
    right.plot(ranks, [n / GB for n in plan.received_bytes], ".", markersize=4, label="received")
    right.step(ranks, [n / GB for n in plan.lower_bound_bytes], where="mid", linewidth=0.8, color="0.3",
               label="must arrive (bound)")
    right.axhline(sum(plan.sent_bytes) / plan.world_size / GB, linestyle="--", linewidth=0.8, label="mean sent")
    right.set(title=f"GB per rank, {plan.bucket_count} collectives of at most {plan.bucket_bytes / 2**20:.0f} MiB",
              xlabel="rank (lines part the training stages)", ylabel="GB", ylim=(0, None))
    right.legend(fontsize=8)
    figure.suptitle(f"{plan.train} ({plan.train_library})  to  {plan.rollout} ({plan.rollout_library})", fontsize=10)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as why:
        raise ConfigError(f"reshard-plan: --png {path} cannot be written: {why}; give another file") from why
    return path
