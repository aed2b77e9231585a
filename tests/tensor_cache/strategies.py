"""Steps of any shape, as arguments of plan_batch."""

from hypothesis import strategies as st

from verl_patches.tensor_cache.batch_plan import held_after_rollout

ANY = st.integers(1, 12)


@st.composite
def steps(draw, worlds=ANY):
    """Any world, and rollout groups and train replicas that need not divide each other."""
    world = draw(worlds)
    replicas = draw(st.integers(1, world))
    groups = draw(st.integers(1, world))
    micro = draw(st.integers(1, 3))
    mini = replicas * micro * draw(st.integers(1, 4))
    samples = mini * draw(st.integers(1, 3))
    of_rank = draw(st.permutations([rank % replicas for rank in range(world)]))
    held = held_after_rollout(samples, draw(st.permutations([rank % groups for rank in range(world)])))
    lengths = draw(st.lists(st.integers(1, 99), min_size=samples, max_size=samples))
    how = {"token_budget": 99 + draw(st.integers(0, 200))} if draw(st.booleans()) else {"micro_batch_size": micro}
    return dict(
        held=held,
        replica_of=of_rank,
        lengths=lengths,
        mini_batch_size=mini,
        balance=draw(st.booleans()),
        loss_agg_mode=draw(st.sampled_from(["token-mean", "seq-mean-token-mean"])),
        **how,
    )
