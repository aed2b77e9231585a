"""Plots of a run and of its memory records."""

from verl_patches.evaluation.plots import draw_memory, plot_run


def test_a_picture_of_reward_and_phases(tmp_path):
    steps = [{"step": n, "reward": n / 4, "seconds": {"rollout": 1.0, "update": 2.0}} for n in (1, 2, 3)]
    first = plot_run({"run": "a", "steps": steps}, tmp_path / "a.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    steps[0]["reward"] = 1.0
    assert plot_run({"run": "a", "steps": steps}, tmp_path / "b.png").read_bytes() != first


def phase(bytes_, **measured):
    return {"rank": 0, "peak_bytes": sum(bytes_.values()), "bytes": bytes_, "measured": measured}


def test_a_picture_of_steps_with_and_without_a_ledger(tmp_path):
    reshard, update = phase({"actor_params": 4, "grads": 0}, rss=9), phase({"grads": 8}, rss=9)
    steps = [{"step": 1, "memory": None}, {"step": 2, "memory": {"phases": {"reshard": reshard, "update": update}}}]
    found = draw_memory({"run": "r", "steps": steps}, tmp_path / "memory.png")
    assert found.read_bytes().startswith(b"\x89PNG")
    more = draw_memory({"run": "r", "steps": 3 * steps}, tmp_path / "more.png")
    assert more.stat().st_size > found.stat().st_size  # negative control: what is drawn depends on the steps
    used = [
        {"step": 2, "memory": {"phases": {"update": phase({"grads": 8}, peak=9, **more)}}}
        for more in ({}, {"used": 12})
    ]
    sizes = [draw_memory({"run": "r", "steps": [s]}, tmp_path / "used.png").stat().st_size for s in used]
    assert sizes[0] < sizes[1]
    assert draw_memory({"run": "r", "steps": []}, tmp_path / "none.png").is_file()
