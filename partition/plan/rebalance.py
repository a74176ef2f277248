"""The change from one split to a better one that moves as little as possible, and whether it pays off.

`diff` returns the layers that each peer gets, and the bytes to move. Parameters and the optimizer's moments
travel; gradients do not, because a plan begins at the end of a step. `rebalance` keeps every peer in its
stage and moves only the borders between neighbours if the result comes near enough to the best split. It
keeps the old split if the gain is below the hysteresis, or does not pay for the moved bytes soon enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from partition.plan.cuts import as_split, best_cut
from partition.plan.forecast import forecast
from partition.plan.problem import Infeasible, Problem, Split
from partition.plan.solver import solve
from partition.plan.tables import IMPOSSIBLE, Tables

HYSTERESIS_PERCENT = 10
"""Minimum gain for a change. A smaller gain is measurement noise, and no reason to move anything."""
NEIGHBOURS_PERCENT = 90
"""How near to the best split, in percent, moving only borders must come to be preferred."""
PAYBACK_STEPS = 100
"""Number of steps within which the gain must pay for the moved bytes."""


@dataclass(frozen=True)
class Move:
    """Layers that a peer gets, and the peers that hold them now; `sources` is empty if no peer holds them."""

    peer: str
    first: int
    last: int
    sources: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Decision:
    """The decision whether to change a split. `split` is the old one if nothing is to change. `gain_percent`
    is the gain in samples per second."""

    split: Split
    moves: tuple[Move, ...]
    gain_percent: int
    reason: str

    @property
    def is_change(self) -> bool:
        """Whether anything moves."""
        return bool(self.moves)


def diff(problem: Problem, old: Split, new: Split, before: Problem | None = None) -> tuple[Move, ...]:
    """Return the layers that each peer of `new` has to fetch. `before` is the problem of `old`, if its peers
    were different."""
    held = _held(before or problem, old)
    moves = []
    for peer, (first, last) in sorted(_held(problem, new).items()):
        begin, end = held.get(peer, (0, 0))
        parts = [(first, min(last, begin)), (max(first, end), last)] if begin < end else [(first, last)]
        for low, high in parts:
            if low < high:
                moves += _moves(problem, peer, low, high, held)
    return tuple(moves)


def _held(problem: Problem, split: Split) -> dict[str, tuple[int, int]]:
    return {
        problem.peers[place].name: span
        for span, group in zip(split.ranges, split.groups, strict=True)
        for place in group
    }


def _moves(problem: Problem, peer: str, low: int, high: int, held: dict[str, tuple[int, int]]) -> list[Move]:
    """Return one move for each stretch of layers that the same peers hold."""
    found: list[Move] = []
    for layer in range(low, high):
        sources = tuple(
            sorted(name for name, (first, last) in held.items() if first <= layer < last and name != peer)
        )
        size = problem.layers[layer].parameter_bytes * (1 + problem.moments)
        if found and found[-1].sources == sources:
            found[-1] = replace(found[-1], last=layer + 1, bytes=found[-1].bytes + size)
        else:
            found.append(Move(peer, layer, layer + 1, sources, size))
    return found


def measured(problem: Problem, old: Split, nanoseconds: Mapping[str, int]) -> Problem:
    """Return the problem with the measured times of the replicas of `old` instead of their claims.

    `nanoseconds` are the times for one micro-batch of the peer's stage, keyed by the peer's name. A peer
    without a measurement is assumed to deviate from its claim by as much as the (lower) median of the others.
    """
    ratios = {}
    for (first, last), group in zip(old.ranges, old.groups, strict=True):
        for place in group:
            peer = problem.peers[place]
            if found := nanoseconds.get(peer.name, 0):
                modelled = sum(peer.forward[first:last]) + sum(peer.backward[first:last])
                ratios[peer.name] = found, max(1, modelled)
    if not ratios:
        return problem
    usual = sorted(ratios.values(), key=lambda pair: Fraction(*pair))[(len(ratios) - 1) // 2]
    peers = []
    for peer in problem.peers:
        found, modelled = ratios.get(peer.name, usual)
        forward, backward = (
            tuple(time * found // modelled for time in times) for times in (peer.forward, peer.backward)
        )
        peers.append(replace(peer, forward=forward, backward=backward))
    return replace(problem, peers=tuple(peers))


def move_borders(problem: Problem, old: Split, *, steps_left: int, pause_nanoseconds: int = 0) -> Decision:
    """Return the best split whose peers stay in their stages, for a run with `steps_left` to do.

    Nothing moves unless half of these steps gain the cost of the move: a pause, and the time to copy
    everything.
    """
    tables = Tables(problem)
    now = step_nanoseconds(problem, old, tables)
    recut = best_cut(tables, old.groups)
    if recut is None or not recut.fits:
        return Decision(old, (), 0, "no border can move")
    new = as_split(tables, recut, is_exact=False)
    time = step_nanoseconds(problem, new, tables)
    assert time is not None
    moves = diff(problem, old, new)
    if now is None:
        return Decision(new, moves, 0, "the old split no longer fits")
    gain = 100 * now // max(1, time) - 100
    if gain < HYSTERESIS_PERCENT or not moves:
        return Decision(old, (), gain, f"a gain of {gain} % is below the hysteresis")
    cost = pause_nanoseconds + _moving(problem, old, new, moves)
    if 2 * cost > steps_left * (now - time):
        reason = f"moving takes longer than half of the remaining {steps_left} steps would gain"
        return Decision(old, (), gain, reason)
    return Decision(new, moves, gain, "only borders between neighbours move")


def _moving(problem: Problem, old: Split, new: Split, moves: Sequence[Move]) -> int:
    """Return the nanoseconds that the moves take over the slowest link."""
    slowest = min(problem.link(one, other).bytes_per_second for one, other in _pairs(old, new))
    return sum(move.bytes for move in moves) * 1_000_000_000 // max(1, slowest)


def rebalance(problem: Problem, old: Split) -> Decision:
    """Return the next split after a change of rates, links or memory, if the peers are still those of `old`.

    `old.groups` are indices of this problem's peers. Raises Infeasible if neither the old split nor any other
    fits.
    """
    tables = Tables(problem)
    now = step_nanoseconds(problem, old, tables)
    recut = best_cut(tables, old.groups)
    near = as_split(tables, recut, is_exact=False) if recut is not None and recut.fits else None
    try:
        best = solve(problem, tables)
    except Infeasible:
        if now is None:
            raise
        return Decision(old, (), 0, "nothing else fits")
    best_time = step_nanoseconds(problem, best, tables)
    near_time = None if near is None else step_nanoseconds(problem, near, tables)
    assert best_time is not None
    enough = near_time is not None and best_time * 100 >= near_time * NEIGHBOURS_PERCENT
    chosen, time = (near, near_time) if enough else (best, best_time)
    assert chosen is not None
    assert time is not None
    moves = diff(problem, old, chosen)
    if now is None:
        return Decision(chosen, moves, 0, "the old split no longer fits")
    gain = 100 * now // max(1, time) - 100
    if gain < HYSTERESIS_PERCENT:
        return Decision(old, (), gain, f"a gain of {gain} % is below the hysteresis")
    if _moving(problem, old, chosen, moves) > PAYBACK_STEPS * (now - time):
        return Decision(old, (), gain, f"moving takes longer than {PAYBACK_STEPS} steps would gain")
    kind = "only borders between neighbours move" if enough else "peers change their stages"
    return Decision(chosen, moves, gain, kind)


def step_nanoseconds(problem: Problem, split: Split, tables: Tables) -> int | None:
    """Return the nanoseconds of a step; None if a stage no longer fits."""
    count = len(split.groups)
    slowest = 0
    for number, ((first, last), group) in enumerate(zip(split.ranges, split.groups, strict=True)):
        if int(tables.stage(group, count - number)[first, last]) >= IMPOSSIBLE:
            return None
        slowest = max(slowest, int(tables.group_time(group)[first, last]))
        if number + 1 < count:
            slowest = max(slowest, tables.transfer(group, split.groups[number + 1], last))
    return forecast(problem, replace(split, bottleneck_nanoseconds=slowest), tables).step_nanoseconds


def _pairs(old: Split, new: Split) -> list[tuple[int, int]]:
    places = sorted({place for split in (old, new) for group in split.groups for place in group})
    return [(one, other) for one in places for other in places if one != other] or [(places[0], places[0])]
