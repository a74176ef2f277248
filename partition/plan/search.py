"""The choice of groups of peers and their order: all possibilities for few peers, a heuristic search for tens
of peers.

With up to EXHAUSTIVE_MAX peers, every ordered grouping of every subset is tried. With more, groupings are
built for every number of stages by giving the fastest peers first to the weakest stage. The best of them are
improved by random moves as long as there is effort left: a peer goes elsewhere, two peers or two stages are
swapped, a stage is split, or two stages are joined. Sometimes a worse grouping is accepted, with a
probability that falls over time (Kirkpatrick and others 1983). The random numbers come from a generator in
this file, so the same problem gives the same answer on every machine.
"""

from collections.abc import Iterator

from partition.plan.cuts import Cut, Groups, best_cut
from partition.plan.problem import Constraints
from partition.plan.tables import Tables

EXHAUSTIVE_MAX = 4
"""Maximum number of peers for which all groupings are tried: four peers have 149, five would have 1,081."""
EFFORT = 1_500
"""Number of cuts that a search evaluates. With more peers each cut costs more, so the solver lowers this
number."""
STARTS_KEPT = 3
WARMTH = 0.1
"""Share by which a grouping may be worse and still be accepted in every third case, at the beginning."""
_MULTIPLIER, _INCREMENT, _MODULUS = 6364136223846793005, 1442695040888963407, 1 << 64


class _Draws:
    """Knuth's linear congruential generator. Its choices are the same on every machine."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, count: int) -> int:
        """Return a number from 0 to `count` - 1."""
        self._state = (self._state * _MULTIPLIER + _INCREMENT) % _MODULUS
        return (self._state >> 33) % count


def allows(rules: Constraints, groups: Groups, layers: int) -> bool:
    """Return whether the numbers of stages and replicas satisfy the constraints."""
    if not groups or len(groups) > layers or (rules.stages and len(groups) != rules.stages):
        return False
    return all(has_replicas(rules, group) for group in groups)


def has_replicas(rules: Constraints, group: tuple[int, ...]) -> bool:
    """Return whether a stage has enough replicas. `replicas`, if set, takes precedence over
    `replicas_min`."""
    return len(group) == rules.replicas if rules.replicas else len(group) >= rules.replicas_min


class BestCuts:
    """The best cut for each number of stages."""

    def __init__(self) -> None:
        self._cuts: dict[int, Cut] = {}

    def note(self, cut: Cut) -> None:
        """Keep a cut if it fits and is better than the best so far with its number of stages."""
        known = self._cuts.get(len(cut.groups))
        if cut.fits and (known is None or cut.order < known.order):
            self._cuts[len(cut.groups)] = cut

    @property
    def cuts(self) -> list[Cut]:
        """The cuts, the best first."""
        return sorted(self._cuts.values(), key=lambda cut: cut.order)


def exhaustive(tables: Tables) -> list[Cut]:
    """Return the best cut for each number of stages, among all ordered groupings; the best first."""
    rules = tables.problem.constraints
    best = BestCuts()
    for groups in _groupings(tuple(range(len(tables.problem.peers)))):
        if allows(rules, groups, tables.count):
            found = best_cut(tables, groups)
            if found is not None:
                best.note(found)
    return best.cuts


def _groupings(peers: tuple[int, ...]) -> Iterator[Groups]:
    """Yield every ordered grouping of every subset, including the empty one."""
    yield ()
    count = len(peers)
    for mask in range(1, 1 << count):
        first = tuple(peer for place, peer in enumerate(peers) if mask >> place & 1)
        rest = tuple(peer for place, peer in enumerate(peers) if not mask >> place & 1)
        for others in _groupings(rest):
            yield (first, *others)


def search(tables: Tables, effort: int = EFFORT) -> list[Cut]:
    """Return the best cut found for each number of stages, the best first; an empty list if none fits."""
    starts: list[Cut] = []
    for groups in _starts(tables):
        found = best_cut(tables, groups)
        if found is not None:
            starts.append(found)
    starts.sort(key=lambda cut: cut.order)
    best = BestCuts()
    tops = []
    for number, start in enumerate(starts[:STARTS_KEPT]):
        best.note(start)
        tops.append(_climb(tables, start, effort // STARTS_KEPT, _Draws(number + 1), best))
    for top in tops:
        best.note(_polish(tables, top, effort))
    return best.cuts


def _starts(tables: Tables) -> Iterator[Groups]:
    """Yield groupings to begin from, for each number of stages. The peers are given to the weakest stage, the
    fastest or the largest first."""
    problem = tables.problem
    rules, count = problem.constraints, len(problem.peers)
    fastest = sorted(range(count), key=lambda place: (-tables.weights[place], place))
    largest = sorted(
        range(count), key=lambda place: (-problem.peers[place].memory_bytes, -tables.weights[place], place)
    )
    for stages in _stage_counts(rules, count, tables.count):
        for ranked in (fastest, largest):
            for groups in _grouped(tables, ranked, stages):
                if allows(rules, groups, tables.count):
                    yield groups


def _stage_counts(rules: Constraints, peers: int, layers: int) -> list[int]:
    if rules.stages:
        return [rules.stages]
    most = min(peers // max(1, rules.replicas or rules.replicas_min), layers)
    if most <= 12:
        return list(range(1, most + 1))
    found = {1, 2, 3, 4, 5, 6, 8, most}
    step = 10
    while step < most:
        found.add(step)
        step = step * 5 // 4 + 1
    return sorted(found)


def _grouped(tables: Tables, ranked: list[int], stages: int) -> Iterator[Groups]:
    rules = tables.problem.constraints
    if rules.replicas:
        size = rules.replicas
        yield tuple(tuple(sorted(ranked[i * size : (i + 1) * size])) for i in range(stages))
        return
    # Also try one peer per stage: some peers may hold a whole stage that others cannot.
    for used in sorted({stages, len(ranked)}):
        groups: list[list[int]] = [[] for _ in range(stages)]
        for place in ranked[:used]:
            weakest = min(
                range(stages),
                key=lambda stage: (
                    len(groups[stage]) >= rules.replicas_min,
                    _rate(tables, groups[stage]),
                    stage,
                ),
            )
            groups[weakest].append(place)
        if all(groups):
            yield tuple(tuple(sorted(group)) for group in groups)


def _rate(tables: Tables, group: list[int]) -> int:
    return sum(tables.weights[place] for place in group)


def _climb(tables: Tables, start: Cut, effort: int, draws: _Draws, noted: BestCuts) -> Cut:
    here = best = start
    rules = tables.problem.constraints
    count = len(tables.problem.peers)
    for turn in range(effort):
        groups = _moved(here.groups, count, draws)
        if groups == here.groups or not allows(rules, groups, tables.count):
            continue
        warmth = WARMTH * (1 - turn / effort) ** 2
        allowance = 1.0 - warmth * _log_uniform(draws)
        below = int(here.score * allowance) + 1 if here.fits else here.score + 1
        found = best_cut(tables, groups, below)
        if found is None:
            continue
        here = found
        noted.note(found)
        if found.order < best.order:
            best = found
    return best


def _polish(tables: Tables, start: Cut, effort: int) -> Cut:
    """Take better neighbours until no neighbour is better or the effort is spent."""
    best, left = start, effort
    rules = tables.problem.constraints
    improved = True
    while improved and left > 0:
        improved = False
        for groups in _neighbours(best.groups, len(tables.problem.peers)):
            if not allows(rules, groups, tables.count):
                continue
            left -= 1
            found = best_cut(tables, groups, best.score)
            if found is not None:
                best, improved = found, True
                break
            if left <= 0:
                break
    return best


def _neighbours(groups: Groups, count: int) -> Iterator[Groups]:
    """Yield every grouping that differs by two stages swapped, two peers swapped, or one peer moved."""
    size = len(groups)
    for one in range(size):
        for other in range(one + 1, size):
            rows = list(groups)
            rows[one], rows[other] = rows[other], rows[one]
            yield tuple(rows)
    homes = {peer: number for number, group in enumerate(groups) for peer in group}
    for peer in range(count):
        rest = [tuple(member for member in group if member != peer) for group in groups]
        for target in range(size):
            if target != homes.get(peer):
                yield _clean([(*group, peer) if n == target else group for n, group in enumerate(rest)])
        for place in range(size + 1):
            yield _clean([*rest[:place], (peer,), *rest[place:]])
        if peer in homes:
            yield _clean(rest)
        for other in range(peer + 1, count):
            if homes.get(peer) != homes.get(other):
                names = {peer: other, other: peer}
                yield _clean([tuple(names.get(member, member) for member in group) for group in groups])


def _clean(rows: list[tuple[int, ...]]) -> Groups:
    return tuple(tuple(sorted(row)) for row in rows if row)


_LOGARITHMS = tuple(
    # Values of ln((k + 1/2) / 16), all negative. Times a temperature, they limit how much worse a grouping
    # may be (Metropolis).
    -round(x, 6)
    for x in (3.465736, 2.367124, 1.856298, 1.519826, 1.268511, 1.067841, 0.900787, 0.757686,
              0.632523, 0.521297, 0.421214, 0.330242, 0.246861, 0.169900, 0.098440, 0.031749)
)  # fmt: skip


def _log_uniform(draws: _Draws) -> float:
    return _LOGARITHMS[draws.below(16)]


def _moved(groups: Groups, count: int, draws: _Draws) -> Groups:
    """Return a random neighbour of `groups`; it may be the same grouping."""
    stages = [list(group) for group in groups]
    match draws.below(6):
        case 0 | 1:
            _move_peer(stages, count, draws)
        case 2:
            _swap_peers(stages, draws)
        case 3 | 4:
            one, other = draws.below(len(stages)), draws.below(len(stages))
            stages[one], stages[other] = stages[other], stages[one]
        case _:
            _split_or_join(stages, draws)
    return tuple(tuple(sorted(stage)) for stage in stages if stage)


def _move_peer(stages: list[list[int]], count: int, draws: _Draws) -> None:
    """Move a peer into another stage, into a new one, or out of the grouping; a peer that is outside may get
    in."""
    peer = draws.below(count)
    for stage in stages:
        if peer in stage:
            stage.remove(peer)
    place = draws.below(2 * len(stages) + 2)
    if place < len(stages):
        stages[place].append(peer)
    elif place <= 2 * len(stages):
        stages.insert(place - len(stages), [peer])


def _swap_peers(stages: list[list[int]], draws: _Draws) -> None:
    one, other = draws.below(len(stages)), draws.below(len(stages))
    first, second = draws.below(len(stages[one])), draws.below(len(stages[other]))
    if one != other:
        stages[one][first], stages[other][second] = stages[other][second], stages[one][first]


def _split_or_join(stages: list[list[int]], draws: _Draws) -> None:
    place = draws.below(len(stages))
    stage = stages[place]
    if len(stage) > 1 and draws.below(2):
        stages[place : place + 1] = [stage[::2], stage[1::2]]
    elif place + 1 < len(stages):
        stages[place : place + 2] = [stage + stages[place + 1]]
