"""The order of one GRPO step: who is on the device in each phase, who comes and who goes, and in which order. No torch.

A phase's `enter` moves are done before its work, its `leave` moves right after it. Moves:
    load T     T gets device memory and its bytes from the host      (nothing to do if it is there)
    alloc T    T gets device memory, contents are made there         (nothing to do if it is there)
    offload T  T's bytes go to the host, its device memory is freed  (nothing to do if it is gone)
    free T     T's device memory is freed, nothing is copied         (nothing to do if it is gone)
    trim       the allocator gives cached blocks back to the device
Where a tenant is not named it stays as it is. Workers carry out this table (conduct.py). verl's own orders, and which
one a run follows: followed.py.

Which order a run follows: ours (phases.py), or, switched back, the one that verl's own workers have. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from verl_patches.errors import ConfigError

TENANTS = {
    "actor_params": "parameters of the actor: Megatron's param buffers",
    "grads": "its main gradients: Megatron's grad buffers",
    "optimizer": "fp32 main parameters and Adam's moments of this rank's share, all at once",
    "swap_window": "the piece of the optimizer that is on the device during a swapped step",
    "ref_params": "parameters of the reference model",
    "rollout_weights": "parameters of vLLM's model, and the projections that it derives from them where it copies",
    "kv_cache": "vLLM's blocks",
    "tensor_cache": "what one stage made for the next, kept on the device until the update has taken it",
    "reshard_buffers": "wire buffers of a weight sync; on verl's own path the tensors it gathers at once",
}
COMES, GOES = ("load", "alloc"), ("offload", "free")


class Move(NamedTuple):
    """One word of the table; `tenant` is empty for trim."""

    verb: str
    tenant: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.tenant}".strip()


@dataclass(frozen=True)
class Phase:
    """One row: the moves before and after its work."""

    name: str
    enter: tuple[Move, ...] = ()
    leave: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Order:
    """A whole step, which begins with nothing on the device but what never moves; `phase(name)` finds a row.

    `whole`: the order that this one leaves phases out of. They may run all the same, in some steps (the truth check's
    pass), and leave nothing behind.
    """

    name: str
    phases: tuple[Phase, ...]
    whole: Order | None = None

    def phase(self, name: str) -> Phase:
        """A row of the table, or of the whole one; ConfigError for a name that is in neither."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        if self.whole is not None:
            return self.whole.phase(name)
        raise ConfigError(f"order {self.name!r} has no phase {name!r}; it has {', '.join(p.name for p in self.phases)}")

    def without(self, phase: str) -> Order:
        """The order of runs that leave out `phase`: old_log_prob, where recipe.train.skip_old_log_prob says so."""
        kept = tuple(p for p in self.phases if p is not self.phase(phase))
        return Order(f"{self.name}, without {phase}", kept, whole=self)

    def lets_go(self, tenant: str, phase: str) -> bool:
        """Whether `tenant` goes before the work of `phase`, or after it."""
        found = self.phase(phase)
        return any(move.tenant == tenant and move.verb in GOES for move in (*found.enter, *found.leave))

    def released_by(self, tenant: str, phase: str) -> str | None:
        """Where `tenant` was last to go before the work of `phase`, "at the end of update (offload)"; None: never."""
        if self.whole is not None and self.phase(phase) not in self.phases:
            return self.whole.released_by(tenant, phase)
        moments = list(_moments(self))
        last = max(i for i, (at, where, _) in enumerate(moments) if at.name == phase and where != "leave")
        for at, where, move in reversed([*moments[last + 1 :], *moments[: last + 1]]):
            if move.tenant == tenant and move.verb in GOES:
                return f"{'at the start of' if where == 'enter' else 'after'} {at.name} ({move.verb})"
        return None


def _moments(order: Order) -> Iterator[tuple[Phase, str, Move]]:
    """(phase, enter | work | leave, move) in order; the work is a moment without a move."""
    for phase in order.phases:
        yield from ((phase, "enter", move) for move in phase.enter)
        yield phase, "work", Move("work")
        yield from ((phase, "leave", move) for move in phase.leave)


def _moves(text: str) -> tuple[Move, ...]:
    return tuple(Move(*words.split()) for words in text.split(", ") if words)


def make_order(name: str, *rows: tuple[str, str, str]) -> Order:
    """An order of rows (phase, enter, leave), moves separated by ", ". ConfigError for what is no move or no tenant."""
    order = Order(name, tuple(Phase(phase, _moves(enter), _moves(leave)) for phase, enter, leave in rows))
    for phase, _, move in _moments(order):
        known = not move.tenant if move.verb in ("trim", "work") else move.tenant in TENANTS
        if move.verb not in (*COMES, *GOES, "trim", "work") or not known:
            raise ConfigError(f"order {name!r}, phase {phase.name}: {move!s} is no move; see memory/schedule.py")
    return order


# Training weights stay from the update to the weight sync; rollout weights come before the KV cache, which is the last
# to come and the first to go. Two trims a step: KV takes what is left, and training follows it. Phases that a worker
# never hears of (reward, advantage) have no moves.
OURS = make_order(
    "ours",
    # phase          enter                                                              leave
    ("reshard",      "load actor_params, alloc rollout_weights, alloc reshard_buffers", "free reshard_buffers, "
                                                                                        "offload actor_params"),
    ("wake_kv",      "trim, alloc kv_cache",                                            ""),
    ("rollout",      "",                                                                "alloc tensor_cache"),
    ("sleep",        "free kv_cache, free rollout_weights, trim",                       ""),
    ("reward",       "",                                                                ""),
    ("old_log_prob", "load actor_params",                                               ""),
    ("ref",          "load ref_params",                                                 "free ref_params"),
    ("advantage",    "",                                                                ""),
    ("update",       "free tensor_cache, load actor_params, alloc grads, load optimizer, alloc swap_window",
                     "free swap_window, offload optimizer, free grads"),
)  # fmt: skip


class Moment(NamedTuple):
    """What a phase holds and costs: `resident` while it works, the highest sum of it, bytes that its moves copy.

    `moves`: those that do something, trims among them.
    """

    phase: str
    resident: frozenset[str]
    peak_bytes: int
    at_peak: frozenset[str]
    to_device_bytes: int
    to_host_bytes: int
    trims: int
    moves: tuple[Move, ...]


def simulate(order: Order, sizes: Mapping[str, int], stays: Collection[str] = ()) -> dict[str, Moment]:
    """{phase: Moment} of a step in the long run; peaks are the higher of the first step's and a later one's.

    `sizes`: bytes of each tenant on this rank, 0 or left out for one that it has not. `stays`: tenants that never
    leave the device, whatever the table says. ConfigError for an order whose phases do not always hold the same.
    """
    sizes = {tenant: sizes.get(tenant, 0) for tenant in TENANTS}
    now = {tenant for tenant in stays if sizes[tenant]}
    first = _step(order, sizes, now, frozenset(stays))
    later = _step(order, sizes, now, frozenset(stays))
    found = {}
    for name, moment in later.items():
        before = first[name]
        if before.resident != moment.resident:
            raise ConfigError(
                f"order {order.name!r}: {name} holds {_names(before.resident)} in the first step and "
                f"{_names(moment.resident)} later; name who comes and goes at its entry"
            )
        highest = max(moment, before, key=lambda each: each.peak_bytes)
        found[name] = moment._replace(peak_bytes=highest.peak_bytes, at_peak=highest.at_peak)
    return found


def _step(order: Order, sizes: Mapping[str, int], now: set[str], stays: frozenset[str]) -> dict[str, Moment]:
    """One step; `now`, who is on the device, is changed in place."""
    found: dict[str, Moment] = {}
    for phase, where, move in _moments(order):
        moment = found.setdefault(phase.name, Moment(phase.name, frozenset(), 0, frozenset(), 0, 0, 0, ()))
        copied, does = 0, move.verb == "trim"
        if move.tenant and move.tenant not in stays and sizes[move.tenant]:
            comes = move.verb in COMES
            does = comes != (move.tenant in now)
            copied = sizes[move.tenant] * (does and move.verb in ("load", "offload"))
            (now.add if comes else now.discard)(move.tenant)
        total = sum(sizes[tenant] for tenant in now)
        if total > moment.peak_bytes:
            moment = moment._replace(peak_bytes=total, at_peak=frozenset(now))
        if where == "work":
            moment = moment._replace(resident=frozenset(now))
        found[phase.name] = moment._replace(
            to_device_bytes=moment.to_device_bytes + copied * (move.verb == "load"),
            to_host_bytes=moment.to_host_bytes + copied * (move.verb == "offload"),
            trims=moment.trims + (move.verb == "trim"), moves=moment.moves + (move,) * does)
    return found


def _names(tenants: Collection[str]) -> str:
    return ", ".join(sorted(tenants)) or "nothing"


def residency(order: Order, stays: Collection[str] = ()) -> dict[str, frozenset[str]]:
    """{phase: who is on the device while it works}: what the ledger expects. ConfigError as `simulate`."""
    of_whole = {} if order.whole is None else residency(order.whole, stays)
    moments = simulate(order, dict.fromkeys(TENANTS, 1), stays)
    return of_whole | {name: moment.resident for name, moment in moments.items()}


def moves_of_a_step(order: Order, stays: Collection[str], tenants: Collection[str]) -> list[str]:
    """What an order does in a step in the long run, with `tenants` and by trims: "load actor_params" and the like."""
    moments = simulate(order, dict.fromkeys(TENANTS, 1), stays).values()
    return [str(move) for moment in moments for move in moment.moves if not move.tenant or move.tenant in tenants]



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

    `copied`: by way of the host; else what a weight sync writes is not copied (memory/sleep_mode.py).
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


def switches_of(rows: Collection[str], *, enforce_eager: bool, synced: bool) -> dict[str, bool]:
    """{our_order, own_life, graphs} for `order_followed`, by the ids of the rows that are on.

    `synced`: see `staying`; captured graphs keep weights that no sync brings by vLLM's copy.
    """
    return {"our_order": "memory.order" in rows,
            "own_life": "memory.sleep_mode" in rows and (enforce_eager or synced),
            "graphs": not enforce_eager}  # fmt: skip


def direct_sync(rows: Collection[str]) -> bool:
    """Whether the resharder writes rollout weights, which proves that it writes every one; verl's own path does not."""
    return "reshard.direct" in rows


def order_followed(
    line: str, *, skip_old_log_prob: bool, our_order: bool = True, own_life: bool = False, graphs: bool = False
) -> Order:  # fmt: skip
    """The order that a run follows, by the rows that are on: ours, or where verl calls its four functions.

    `our_order`: row memory.order;
    `own_life`: rollout weights come and go without vLLM's copy, but for `graphs` without its sleep mode too.
    """
    if our_order:
        order = OURS if own_life and not graphs else in_sleep_mode(OURS, copied=not own_life)
    else:
        order = with_own_life(VERL[line]) if own_life else VERL[line]
    return order.without("old_log_prob") if skip_old_log_prob else order


def staying(
    *, param_offload: bool, optimizer_offload: bool, ref_offload: bool, one_memory: bool = False,
    our_order: bool = True, own_life: bool = False, synced: bool = True,
) -> frozenset[str]:  # fmt: skip
    """Tenants that a run never moves: those of verl's three offload switches that are off.

    verl frees gradients with the parameters, its grad_offload is read nowhere. `one_memory`: host and device are the
    same (a CPU), where verl's moves from device to device move nothing; buffers that it resizes go there too, and with
    `our_order` (row memory.order) everything does. There vLLM's sleep leaves the rollout weights;
    with `own_life` they go everywhere, but where not `synced`: no weight sync brings new ones
    (recipe.weight_sync.enabled), or none that provably writes all (`direct_sync`).
    """
    stays = set() if param_offload else {"actor_params", "grads"}
    unmoved = one_memory and not our_order
    if not optimizer_offload or unmoved:
        stays.add("optimizer")
    if not ref_offload or unmoved:
        stays.add("ref_params")
    if not synced if own_life else one_memory:
        stays.add("rollout_weights")
    return frozenset(stays)
