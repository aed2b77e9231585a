"""Which order a run follows: ours (phases.py), or, switched back, the one that verl's own workers have. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from verl_patches.errors import ConfigError
from verl_patches.memory.phases import COMES, OURS, Move, Order, Phase, make_order

_COPIES = tuple(f"memory.{way}_{what}" for what in ("model", "optimizer") for way in ("load", "offload"))
_TRAINING = ("actor_params", "grads", "optimizer", "ref_params")

# After the weight sync both of verl's orders are the same: verl/workers/megatron_workers.py, its compute_log_prob,
# compute_ref_log_prob and update_actor; verl/utils/megatron_utils.py trims in each of its four functions.
_VERL_TRAINING = (
    ("rollout",      "",                                                                ""),
    # megatron_vllm.py, __exit__: sleep(level=1) keeps a copy of the weights on the host; the worker trims once more
    ("sleep",        "offload rollout_weights, free kv_cache, trim, trim",              ""),
    ("reward",       "",                                                                ""),
    ("old_log_prob", "load actor_params, trim",                                         "offload actor_params, trim, "
                                                                                        "trim"),
    ("ref",          "load ref_params, trim",                                           "offload ref_params, trim, "
                                                                                        "trim"),
    ("advantage",    "",                                                                ""),
    ("update",       "load actor_params, alloc grads, trim, load optimizer, trim, alloc swap_window",
                     "free swap_window, offload actor_params, free grads, trim, offload optimizer, trim, trim"),
)  # fmt: skip
# megatron_workers.py:449 generate_sequences: loads gradients too, offloads both after the sync, then wakes the cache
VERL_0_4_0 = make_order(
    "verl 0.4.0",
    ("reshard",      "load actor_params, alloc grads, trim, offload optimizer, trim, load rollout_weights, "
                     "alloc reshard_buffers",                                           "free reshard_buffers, "
                     "offload actor_params, free grads, trim"),
    ("wake_kv",      "alloc kv_cache",                                                  ""),
    *_VERL_TRAINING,
)  # fmt: skip
# megatron_workers.py:447: its sharding manager wakes the cache (megatron_vllm.py:334) before the worker offloads
VERL_54C9B736 = make_order(
    "verl 54c9b736",
    ("reshard",      "load actor_params, alloc grads, trim, load rollout_weights, alloc reshard_buffers",
                     "free reshard_buffers"),
    ("wake_kv",      "alloc kv_cache",                                                  "offload actor_params, "
                     "free grads, trim, offload optimizer, trim"),
    *_VERL_TRAINING,
)  # fmt: skip
VERL = {"pypi": VERL_0_4_0, "a3": VERL_54C9B736}


def in_sleep_mode(order: Order, copied: bool = True) -> Order:
    """`order`, ours, where vLLM's sleep mode moves the rollout weights, in memory past the pool.

    `copied`: by way of the host; else what a weight sync writes is not copied (memory/graph_life.py).
    """
    come, go = ("load", "offload") if copied else ("alloc", "free")
    changed = {Move("alloc", "rollout_weights"): (Move("trim"), Move(come, "rollout_weights")),
               Move("free", "rollout_weights"): (Move(go, "rollout_weights"),)}  # fmt: skip
    how = "with vLLM's sleep mode" if copied else "addresses kept by vLLM"
    return _exchanged(f"{order.name}, {how}", order, changed)


def with_own_life(order: Order) -> Order:
    """`order`, verl's, where rollout weights come and go without a copy."""
    changed = {Move("load", "rollout_weights"): (Move("alloc", "rollout_weights"),),
               Move("offload", "rollout_weights"): (Move("free", "rollout_weights"),)}  # fmt: skip
    return _exchanged(f"{order.name}, rollout weights not copied", order, changed)


def _exchanged(name: str, order: Order, changed: Mapping[Move, tuple[Move, ...]]) -> Order:
    def each(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(new for move in moves for new in changed.get(move, (move,)))

    return Order(name, tuple(Phase(p.name, each(p.enter), each(p.leave)) for p in order.phases))


def with_our_copies(order: Order) -> Order:
    """`order`, verl's, where rows memory.load_* and memory.offload_* copy, at the places where verl calls them.

    What was loaded for log-probs is dropped, not copied back; moves do not trim, vLLM's memory is made room for when
    it wakes (row memory.trim_before_wake).
    """
    read_only = {("ref", "ref_params"), ("old_log_prob", "actor_params")}

    def changed(phase: Phase, moves: tuple[Move, ...]) -> Iterator[Move]:
        moved = False
        for move in moves:
            if move.verb == "trim" and moved:  # the one inside verl's own function
                moved = False
                continue
            if move.tenant in ("rollout_weights", "kv_cache") and move.verb in COMES:
                yield Move("trim")
            moved = moved or move.tenant in _TRAINING
            dropped = move.verb == "offload" and (phase.name, move.tenant) in read_only
            yield Move("free", move.tenant) if dropped else move

    return Order(f"{order.name}, with our copies", tuple(
        Phase(phase.name, tuple(changed(phase, phase.enter)), tuple(changed(phase, phase.leave)))
        for phase in order.phases))


def switches_of(rows: Collection[str], *, enforce_eager: bool, synced: bool) -> dict[str, bool]:
    """{our_order, our_copies, own_life, graphs} for `order_followed`, by the ids of the rows that are on.

    `synced`: see `staying`; captured graphs keep weights that no sync brings by vLLM's copy. ConfigError for some of
    the four rows that copy without the others: verl's moves and ours together are no order that there is a table for.
    """
    copies = [row for row in _COPIES if row in rows]
    if copies and len(copies) < len(_COPIES):
        raise ConfigError(f"rows {', '.join(copies)} are on without {', '.join(r for r in _COPIES if r not in rows)}: "
                          "expected all four or none in recipe.patches")
    return {"our_order": any(row.startswith("memory.order") for row in rows),
            "our_copies": bool(copies),
            "own_life": "memory.rollout_life" in rows and (enforce_eager or synced),
            "graphs": not enforce_eager}  # fmt: skip


def direct_sync(rows: Collection[str]) -> bool:
    """Whether the resharder writes rollout weights, which proves that it writes every one; verl's own path does not."""
    return any(row.startswith("reshard.direct") for row in rows)


def order_followed(
    line: str, *, skip_old_log_prob: bool, our_order: bool = True, our_copies: bool = True, own_life: bool = False,
    graphs: bool = False,
) -> Order:  # fmt: skip
    """The order that a run follows, by the rows that are on: ours, or where verl calls its four functions.

    `our_order`: rows memory.order*, which need the others; `our_copies`: rows memory.load_* and memory.offload_*;
    `own_life`: rollout weights come and go without vLLM's copy, but for `graphs` without its sleep mode too.
    """
    if our_order:
        order = OURS if own_life and not graphs else in_sleep_mode(OURS, copied=not own_life)
    else:
        order = with_our_copies(VERL[line]) if our_copies else VERL[line]
        order = with_own_life(order) if own_life else order
    return order.without("old_log_prob") if skip_old_log_prob else order


def staying(
    *, param_offload: bool, optimizer_offload: bool, ref_offload: bool, one_memory: bool = False,
    our_copies: bool = True, own_life: bool = False, synced: bool = True,
) -> frozenset[str]:  # fmt: skip
    """Tenants that a run never moves: those of verl's three offload switches that are off.

    verl frees gradients with the parameters, its grad_offload is read nowhere. `one_memory`: host and device are the
    same (a CPU), where verl's moves from device to device move nothing; buffers that it resizes go there too, and with
    `our_copies` (rows memory.load_*, memory.offload_*) everything does. There vLLM's sleep leaves the rollout weights;
    with `own_life` they go everywhere, but where not `synced`: no weight sync brings new ones
    (recipe.weight_sync.enabled), or none that provably writes all (`direct_sync`).
    """
    stays = set() if param_offload else {"actor_params", "grads"}
    unmoved = one_memory and not our_copies
    if not optimizer_offload or unmoved:
        stays.add("optimizer")
    if not ref_offload or unmoved:
        stays.add("ref_params")
    if not synced if own_life else one_memory:
        stays.add("rollout_weights")
    return frozenset(stays)
