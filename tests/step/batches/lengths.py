"""Draw lengths of samples as a step has them: a long tail, cut at the limit of generation."""

import math
import random

PROMPT, RESPONSE = 1024, 3072  # largest numbers of tokens in configs of the 256-die run


def lognormal_lengths(samples, cv, *, seed, group=16, mean_response=1000, mean_prompt=200):
    """Return tokens of prompt and response by sample; `cv` is of uncut responses; a `group` shares a prompt."""
    source = random.Random(seed)

    def draw(mean, most):
        sigma = math.sqrt(math.log(1 + cv * cv))
        return max(1, min(most, round(source.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    prompts = [draw(mean_prompt, PROMPT) for _ in range(-(-samples // group))]
    return [prompts[sample // group] + draw(mean_response, RESPONSE) for sample in range(samples)]
