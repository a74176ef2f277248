"""One peer's walk over Moshpit's grid: where its next group forms, and where it stands afterwards.

Peers count their turns by themselves, so they drift apart: a peer that failed a round, or joined late, is
behind. A group's `round` is its convener's turn, and its members go on from there. A key names the axis and
not the turn, so peers a whole cycle apart still meet. When the number of peers asks for other axes, each
peer starts anew from its cell in that grid: sizes are derived, never negotiated. A peer whose view differs
may stand in a cell where nobody comes; it joins the next group that forms under the run's common key.

Not here: the grid itself (`gossip.averaging.grid`), and how those under one key meet (`gossip.matchmaking`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from crypto.identity import PeerId
from gossip.averaging.grid import Grid
from gossip.averaging.group import Group

TURNS_AHEAD_MAX = 1_024
"""A convener's turn that is further ahead than this is not believed: turns stay far below their limit."""


@dataclass(frozen=True)
class Spot:
    """Where a peer looks for its next group: under `key`, of `size` members in a full grid. `coordinate` is
    the peer's place on the axis along which the group lies."""

    key: bytes
    size: int
    coordinate: int


class GridWalk:
    """One peer in one run's grid."""

    def __init__(self, name: bytes, peer: PeerId) -> None:
        """`name` is the run's, of at most `group.NAME_BYTES_MAX` bytes."""
        self._name = name
        self._peer = peer
        self._grid: Grid | None = None
        self._cell: tuple[int, ...] = ()
        self.turn = 0

    @property
    def axes(self) -> tuple[int, ...]:
        """The sides of the grid that this peer stands in."""
        return () if self._grid is None else self._grid.axes

    def spot(self, others: Iterable[PeerId], size_max: int) -> Spot | None:
        """Return where the next group forms, in groups of at most `size_max`; None where all fit in one."""
        grid = Grid(self._name, 0, (self._peer, *others), size_max)
        if grid.axes != self.axes:
            self._grid, self._cell = grid, grid.start(self._peer)
        if len(grid.axes) == 1:
            return None
        axis = grid.axis(self.turn)
        return Spot(grid.key(axis, self._cell), grid.axes[axis], self._cell[axis])

    def averaged(self, group: Group, spot: Spot | None) -> None:
        """Go on after a round: from the place drawn in the group of a spot, from the same cell after any
        other. The members' places on the axis are those that they gave."""
        grid, turn = self._grid, self.turn
        agreed = group.round if turn <= group.round <= turn + TURNS_AHEAD_MAX else turn
        if grid is not None and spot is not None and grid.axis(agreed) == grid.axis(turn):
            held = {PeerId(member.peer): member.coordinate for member in group.members}
            self._cell = grid.moved(agreed, self._cell, held)[self._peer]
        self.turn = agreed + 1

    def failed(self) -> None:
        """Stay in the cell and take the next axis: the group of this one did not come."""
        self.turn += 1
