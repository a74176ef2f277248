"""One peer's walk over Moshpit's grid: the cell of its next group, and its cell afterwards.

Each peer counts its own turns, so counts drift apart: a peer that failed a round, or joined late, is behind.
A group's `round` is its convener's turn, and its members continue from there. A key names the axis and not
the turn, so peers that are a whole cycle apart still meet. When the number of peers requires different axes,
each peer starts again from its cell in the new grid: sizes are derived, never negotiated. A peer whose view
differs may be alone in its cell; it joins the next group that forms under the run's common key. If more peers
take part than a peer knows, sizes follow from estimates, which differ among peers. In that case, two grids
with differently rounded sizes are used in alternation.

Not here: the grid itself (`gossip.averaging.grid`), and how the peers under one key meet
(`gossip.matchmaking`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, log2

from crypto.identity import PeerId
from gossip.averaging.grid import Grid
from gossip.averaging.group import Group

TURNS_AHEAD_MAX = 1_024
"""A convener's turn is rejected if it is further ahead than this, so turns stay far below their limit."""


@dataclass(frozen=True)
class Spot:
    """The position of a peer's next group: its `key`, and its `size` in a full grid. `coordinate` is the
    peer's coordinate on the axis along which the group lies."""

    key: bytes
    size: int
    coordinate: int


class GridWalk:
    """One peer in one run's grid, or in two alternating grids if the number of peers is only estimated."""

    def __init__(self, name: bytes, peer: PeerId) -> None:
        """`name` is the run's name, at most `group.NAME_BYTES_MAX` bytes."""
        self._name = name
        self._peer = peer
        self._grids: list[Grid | None] = [None, None]
        self._cells: list[tuple[int, ...]] = [(), ()]
        self._is_estimated = False
        self.turn = 0

    @property
    def axes(self) -> tuple[int, ...]:
        """The sides of the grid in which this peer currently is."""
        grid = self._grids[self._which(self.turn)]
        return () if grid is None else grid.axes

    def spot(self, others: Iterable[PeerId], size_max: int, estimated: int = 0) -> Spot | None:
        """Return the spot of the next group, of at most `size_max` members; None if all peers fit into one
        group. `estimated` is the approximate number of peers if `others` are not all of them."""
        self._is_estimated = estimated > 0
        which = self._which(self.turn)
        count = _rounded(estimated, which) if estimated else 0
        grid = Grid(self._name, which, (self._peer, *others), size_max, count)
        if grid.axes != self.axes:
            self._grids[which], self._cells[which] = grid, grid.start(self._peer)
        if len(grid.axes) == 1:
            return None
        axis, cell = grid.axis(self._round(self.turn)), self._cells[which]
        return Spot(grid.key(axis, cell), grid.axes[axis], cell[axis])

    def averaged(self, group: Group, spot: Spot | None) -> None:
        """Advance after a round. If the group was formed at `spot`, the next cell follows from the exchange
        in it; after any other group the cell stays the same. The members' coordinates on the axis are those
        that they declared."""
        turn, which = self.turn, self._which(self.turn)
        grid, cell = self._grids[which], self._cells[which]
        agreed = group.round if turn <= group.round <= turn + TURNS_AHEAD_MAX else turn
        number = self._round(agreed)
        is_same = self._which(agreed) == which
        if (
            grid is not None
            and spot is not None
            and is_same
            and grid.axis(number) == grid.axis(self._round(turn))
        ):
            held = {PeerId(member.peer): member.coordinate for member in group.members}
            self._cells[which] = grid.moved(number, cell, held)[self._peer]
        self.turn = agreed + 1

    def failed(self) -> None:
        """Stay in the cell and take the next axis, because the group along this axis did not form."""
        self.turn += 1

    def _which(self, turn: int) -> int:
        """Return which grid a turn belongs to."""
        return turn % 2 if self._is_estimated else 0

    def _round(self, turn: int) -> int:
        """Return the number of a turn among the turns of its grid."""
        return turn // 2 if self._is_estimated else turn


def _rounded(estimated: int, which: int) -> int:
    """Return the size of a grid for about this many peers: a power of two, or the middle between two.

    If slightly different estimates lead to different sizes in one grid, they lead to the same size in the
    other. Averaging alternates between the two grids, so no peers stay apart.
    """
    exponent = log2(max(2, estimated))
    return round(2 ** floor(exponent + 0.5)) if not which else round(2 ** (floor(exponent) + 0.5))
