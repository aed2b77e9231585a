from verl_patches.evaluation.plots import plot_run


def test_a_picture_of_reward_and_phases(tmp_path):
    steps = [{"step": n, "reward": n / 4, "seconds": {"rollout": 1.0, "update": 2.0}} for n in (1, 2, 3)]
    first = plot_run({"run": "a", "steps": steps}, tmp_path / "a.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    steps[0]["reward"] = 1.0
    assert plot_run({"run": "a", "steps": steps}, tmp_path / "b.png").read_bytes() != first
