"""Verifiable rewards in verl's `custom_reward_function` contract, how parts compose, and the tables they score."""
