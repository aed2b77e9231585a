"""Compute verifiable rewards in verl's `custom_reward_function` contract, and add up the parts of a reward."""
