"""Lengths of samples as a step has them: a long tail, cut off where generation is."""

import math
import random

PROMPT, RESPONSE = 1024, 3072  # most tokens, configs of the 256-die run


def lognormal_lengths(samples, cv, *, seed, group=16, mean_response=1000, mean_prompt=200):
    """[sample] -> tokens of prompt and response; `cv` is that of uncut responses; prompts are shared by `group`."""
    source = random.Random(seed)

    def draw(mean, most):
        sigma = math.sqrt(math.log(1 + cv * cv))
        return max(1, min(most, round(source.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    prompts = [draw(mean_prompt, PROMPT) for _ in range(-(-samples // group))]
    return [prompts[sample // group] + draw(mean_response, RESPONSE) for sample in range(samples)]
