"""Draw steps of any shape as arguments of plan_batch."""

from hypothesis import strategies as st

ANY = st.integers(1, 12)


@st.composite
def steps(draw, worlds=ANY):
    """Draw any world, and train replicas that need not divide it."""
    world = draw(worlds)
    replicas, micro = draw(st.integers(1, world)), draw(st.integers(1, 3))
    mini = replicas * micro * draw(st.integers(1, 4))
    samples = mini * draw(st.integers(1, 3))
    size = {"token_budget": 99 + draw(st.integers(0, 200))} if draw(st.booleans()) else {"micro_batch_size": micro}
    return dict(
        replica_by_rank=draw(st.permutations([rank % replicas for rank in range(world)])),
        lengths=draw(st.lists(st.integers(1, 99), min_size=samples, max_size=samples)),
        mini_batch_size=mini,
        balance=draw(st.booleans()),
        **size,
    )
