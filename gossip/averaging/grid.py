"""Moshpit's grid (Ryabinin et al. 2021, algorithm 1), which decides which peers average together, for any
number of peers.

Peers occupy the cells of a grid with d axes. In round t, the peers that agree in all coordinates except that
of axis t mod d form one group. Afterwards the members exchange their coordinates on that axis, so peers that
have just averaged together next average with different peers. In a full grid, d rounds give everybody the
exact mean.

A half-filled grid mixes worse than random groups, so the grid follows the number of peers. In each epoch all
peers compute its axes and cells again, from the epoch's number and their known members. Peers with slightly
different lists may share a cell, which costs some rounds but no correctness.

Pairwise gossip is a grid whose groups have two members.

Not here: one peer's walk over the grid (`gossip.averaging.walk`), membership, and the rounds themselves
(`node.averaging.participation`).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod

from blake3 import blake3

from crypto.identity import PeerId
from gossip.averaging.group import GROUP_MEMBERS_MAX, NAME_BYTES_MAX

AXES_MAX = 8
KEY_BYTES = 32
GROUP_SIZE_MIN = 2
FILLED = 0.75


def axes_of(count: int, group_size: int) -> tuple[int, ...]:
    """Return the sides of the grid for `count` peers, in groups of at most `group_size`. It chooses the
    fewest possible axes, then the fewest empty cells, then the most even sides. Raises ValueError for an
    invalid size.

    For example, 1,024 peers in groups of 32 occupy 32 x 32 cells, 512 peers 16 x 32, 509 peers 17 x 30.
    """
    if not GROUP_SIZE_MIN <= group_size <= GROUP_MEMBERS_MAX:
        raise ValueError(f"a group has {GROUP_SIZE_MIN}-{GROUP_MEMBERS_MAX} members, not {group_size}")
    if count <= group_size:
        return (max(count, 1),)
    axes = 1
    while group_size**axes < count and axes < AXES_MAX:
        axes += 1
    if axes > 3:
        return (group_size,) * (axes - 1) + (min(group_size, ceil(count / group_size ** (axes - 1))),)
    return min(
        (sides for sides in _sides(count, axes, group_size) if prod(sides) >= count),
        key=lambda sides: (prod(sides), max(sides) - min(sides)),
    )


def _sides(count: int, axes: int, side_max: int) -> Iterable[tuple[int, ...]]:
    """Yield all ascending combinations of sides; the last side is as short as the others allow."""
    if axes == 1:
        if count <= side_max:
            yield (count,)
        return
    for side in range(2, side_max + 1):
        for rest in _sides(ceil(count / side), axes - 1, side_max):
            if side <= rest[0]:
                yield (side, *rest)


class Grid:
    """One epoch's grid, computed from the members that one peer knows. The same members give the same
    grid."""

    def __init__(
        self, name: bytes, epoch: int, members: Iterable[PeerId], group_size: int, count: int = 0
    ) -> None:
        """`count` is the number of participants if `members` are only some of them. In that case every cell
        is determined by hash only."""
        if len(name) > NAME_BYTES_MAX:
            raise ValueError(f"a name has at most {NAME_BYTES_MAX} bytes")
        self.name = name
        self.epoch = epoch
        self._cells: dict[PeerId, int] = {}
        if count:
            self.axes = axes_of(count, group_size)
            return
        ranked = sorted(dict.fromkeys(members), key=self._rank)
        self.axes = axes_of(len(ranked), group_size)
        cells = prod(self.axes)
        # Spread the peers over all cells, so that the empty cells are not adjacent.
        self._cells = {peer: place * cells // len(ranked) for place, peer in enumerate(ranked)}

    def start(self, peer: PeerId) -> tuple[int, ...]:
        """Return a peer's coordinates in the first round of the epoch. The coordinates of a peer that is not
        a member come from a hash."""
        cells = prod(self.axes)
        cell = self._cells.get(peer)
        if cell is None:
            cell = int.from_bytes(self._rank(peer)[:8], "big") % cells
        coordinates = []
        for side in reversed(self.axes):
            cell, at = divmod(cell, side)
            coordinates.append(at)
        return tuple(reversed(coordinates))

    def axis(self, round_number: int) -> int:
        """Return the axis along which groups form in a round; rounds are counted from 0 in each epoch."""
        return round_number % len(self.axes)

    def key(self, round_number: int, coordinates: Sequence[int]) -> bytes:
        """Return the name of the group at these coordinates, which is equal for all its members."""
        axis = self.axis(round_number)
        rest = [str(at) for place, at in enumerate(coordinates) if place != axis]
        text = f"{self.epoch}/{round_number}/{'x'.join(map(str, self.axes))}/{','.join(rest)}"
        return blake3(self.name + b"\0" + text.encode()).digest()

    def moved(
        self, round_number: int, coordinates: Sequence[int], held: Mapping[PeerId, int]
    ) -> dict[PeerId, tuple[int, ...]]:
        """Return the coordinates of all members after a round in this group.

        `held` gives each member's coordinate on the round's axis. Members exchange these coordinates by hash,
        so an absent member stays alone in its cell, and a full grid stays full. Members that shared a
        coordinate take free ones. A group that fills less than three quarters of its side spreads evenly.
        """
        axis = self.axis(round_number)
        side = self.axes[axis]
        key = self.key(round_number, coordinates)
        ranked = sorted(held, key=lambda peer: blake3(key + peer).digest())
        places = sorted({place % side for place in held.values()})
        free = [place for place in range(side) if place not in places]
        wanted = min(len(ranked) - len(places), len(free))
        places = sorted(places + [free[number * len(free) // wanted] for number in range(wanted)])
        if len(ranked) < FILLED * side:
            places = [number * side // len(ranked) for number in range(len(ranked))]
        before, after = tuple(coordinates[:axis]), tuple(coordinates[axis + 1 :])
        return {peer: (*before, places[number % len(places)], *after) for number, peer in enumerate(ranked)}

    def _rank(self, peer: PeerId) -> bytes:
        return blake3(self.name + b"\0" + self.epoch.to_bytes(8, "big") + peer).digest()
