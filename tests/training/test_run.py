from verl_patches.training.run import header, line


def test_a_row_of_the_table_is_as_wide_as_its_header():
    step = {"step": 3, "reward": 0.5, "grad_norm": 1.0, "logprob_delta": {"mean": 5e-7, "max": 1e-6}, "seconds": {}}
    assert len(line(step)) == len(header())
    assert " - " in line({**step, "logprob_delta": None}) and " - " in line({**step, "grad_norm": None})
