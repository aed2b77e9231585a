"""The step of one worker, written down once: worker, sharding manager, rollout engine, and what a process shares."""
