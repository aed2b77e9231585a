"""How the parts of a reward become one number in 0..1.

A correct answer earns 1.0, always. A wrong answer in the right form earns `format_weight`, anything else earns
nothing. The form's share is small because GRPO divides by the spread inside a group: where no response of a group is
correct, the form alone decides the advantages however small its weight, so it only has to be above zero to give a
first signal, and a weight of 0 switches that off.
"""

from __future__ import annotations

from verl_patches.errors import ConfigError

FORMAT_WEIGHT = 0.1
MAX_FORMAT_WEIGHT = 0.5


def compose(correct: bool, well_formed: bool, format_weight: float = FORMAT_WEIGHT) -> float:
    """Reward in 0..1 of one response from its two parts.

    A response that is not well formed is never paid for being correct: it holds no answer that could be checked.
    Raises ConfigError unless 0 <= format_weight <= 0.5, so that the form never comes near a correct answer.
    """
    if not 0.0 <= format_weight <= MAX_FORMAT_WEIGHT:
        raise ConfigError(
            f"reward: format_weight must be in 0..{MAX_FORMAT_WEIGHT}, found {format_weight}: "
            "set custom_reward_function.reward_kwargs.format_weight"
        )
    if not well_formed:
        return 0.0
    return 1.0 if correct else float(format_weight)
