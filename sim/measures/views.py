"""Measures of member lists: every second, the list of each watched peer is compared with the peers that are
up. Both are kept in one matrix.

A row is a watched peer, a column is a peer that may be listed. A row follows the events of its peer; a peer
that has just started is asked once for its initial list. All peers are watched if there are at most
`ROWS_MAX`; in a larger or scoped swarm it is `SOME_ROWS` of them, evenly spaced by number.

An entry is right if it says live and its peer is up and reachable, without a split between. The share of
right entries is |listed and up| / |listed or up|, so peers that are neither listed nor up do not count as
right.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from gossip.member import MemberDown, MemberForgotten, MemberLeft, MemberUp, Status
from sim.events import PeerStarted, PeerStopped
from sim.measures.rows import Row, known, mean
from sim.measures.swarm import Swarm
from sim.observers import Observation, World

ROWS_MAX = 4_096
"""Maximum number of rows. Beyond it, a row for each peer would cost more memory than the peers themselves."""
SOME_ROWS = 128
_SCOPE_QUESTIONS_MAX = 50_000
"""Maximum number of pairs whose scope is asked for in one sample. Scopes move slowly, so the pairs take
turns."""

Mask = npt.NDArray[np.bool_]


class Listener(Protocol):
    """A listener that is told how many watched live peers list a peer that is gone; `detection` uses this."""

    def follows(self, subject: int) -> bool: ...
    def listed(self, now: float, subject: int, change: int) -> None: ...


class Views:
    """Metrics: `views_right_share` is the share of lists that are entirely right, `entries_right_share` the
    share of right entries, `entries_missing_share` the share of live peers that are not listed,
    `entries_stale_share` the share of listed peers that are gone."""

    def __init__(self, swarm: Swarm, listener: Listener, *, scoped: bool, settled_seconds: float) -> None:
        size = len(swarm.peers)
        watched = size if size <= SOME_ROWS or (size <= ROWS_MAX and not scoped) else SOME_ROWS
        self._observers = np.array([row * size // watched for row in range(watched)])
        self._swarm = swarm
        self._listener = listener
        self._size = size
        self._settled_seconds = settled_seconds
        self._rows = {swarm.peers[number]: row for row, number in enumerate(self._observers)}
        # A flat bytearray is the fastest for setting a single entry; numpy uses the same memory.
        self._flat = bytearray(watched * size)
        self._matrix = np.frombuffer(self._flat, dtype=np.uint8).reshape(watched, size).view(bool)
        self._scope: Mask | None = np.zeros((watched, size), dtype=bool) if scoped else None
        self._next_scope = 0
        self._fresh: dict[int, None] = {}
        self._right_views: list[float] = []
        self._right_entries: list[float] = []
        self.handlers = {
            MemberUp: self._joined,
            MemberDown: self._gone,
            MemberLeft: self._gone,
            MemberForgotten: self._gone,
            PeerStarted: self._started,
            PeerStopped: self._stopped,
        }

    @property
    def watched(self) -> int:
        return len(self._observers)

    def listing(self, subject: int) -> int:
        """Return how many watched peers that are up list `subject` as live."""
        column = self._matrix[:, subject] & self._swarm.up[self._observers]
        if self._scope is not None:
            column &= self._scope[:, subject]
        return int(column.sum())

    def sample(self, now: float, world: World, rows: list[Row]) -> None:
        self._ask_the_fresh(now, world)
        self._ask_for_scopes(world)
        up = self._swarm.up
        looking = up[self._observers]
        if not looking.any():
            return
        observers = self._observers[looking]
        listed = self._matrix[looking]
        to_list = self._to_list(observers)
        to_list[np.arange(len(observers)), observers] = False
        if self._scope is not None:
            listed &= self._scope[looking]
            to_list &= self._scope[looking]
        both = (listed & to_list).sum(axis=1)
        listed_count, to_list_count = listed.sum(axis=1), to_list.sum(axis=1)
        either = listed_count + to_list_count - both
        figures = {
            "views_right_share": float((both == either).mean()),
            "entries_right_share": mean((both / np.maximum(either, 1))[either > 0]) if either.any() else 1.0,
            "entries_missing_share": _share(to_list_count - both, to_list_count),
            "entries_stale_share": _share(listed_count - both, listed_count),
        }
        if now >= self._settled_seconds:
            self._right_views.append(figures["views_right_share"])
            self._right_entries.append(figures["entries_right_share"])
        rows += [Row(now, metric, "", value) for metric, value in figures.items()]

    def summary(self) -> dict[str, float | None]:
        return {
            "watched_peers": self.watched,
            "views_right_share_mean": known(mean(self._right_views)),
            "views_right_share_end": known(self._right_views[-1]) if self._right_views else None,
            "entries_right_share_mean": known(mean(self._right_entries)),
            "entries_right_share_min": known(min(self._right_entries)) if self._right_entries else None,
            "entries_right_share_end": known(self._right_entries[-1]) if self._right_entries else None,
        }

    def _to_list(self, observers: npt.NDArray[np.int64]) -> Mask:
        sides = self._swarm.sides
        if not sides.any():
            return np.repeat(self._swarm.up[np.newaxis, :], len(observers), axis=0)
        reached: Mask = sides[observers][:, np.newaxis] == sides[np.newaxis, :]
        return reached & self._swarm.up

    def _joined(self, observed: Observation) -> None:
        self._set(observed, 1)

    def _gone(self, observed: Observation) -> None:
        self._set(observed, 0)

    def _set(self, observed: Observation, value: int) -> None:
        assert observed.peer is not None, "a member list belongs to a peer"
        row = self._rows.get(observed.peer)
        subject = self._swarm.numbers.get(observed.event.peer)
        if row is None or subject is None:
            return
        self._note(observed.time, row, subject, value)

    def _note(self, now: float, row: int, subject: int, value: int) -> None:
        place = row * self._size + subject
        if self._flat[place] == value:
            return
        self._flat[place] = value
        if self._listener.follows(subject) and self._in_scope(row, subject):
            self._listener.listed(now, subject, 1 if value else -1)

    def _in_scope(self, row: int, subject: int) -> bool:
        return self._scope is None or bool(self._scope[row, subject])

    def _started(self, observed: Observation) -> None:
        row = self._rows.get(observed.peer) if observed.peer is not None else None
        if row is not None:
            self._forget(observed.time, row)
            self._fresh[row] = None

    def _stopped(self, observed: Observation) -> None:
        row = self._rows.get(observed.peer) if observed.peer is not None else None
        if row is not None:
            self._forget(observed.time, row)
            self._fresh.pop(row, None)

    def _forget(self, now: float, row: int) -> None:
        for subject in np.flatnonzero(self._matrix[row]):
            self._note(now, row, int(subject), 0)

    def _ask_the_fresh(self, now: float, world: World) -> None:
        """Ask peers that have just started for their lists: a process may begin with the list of an earlier
        one, which no event reports."""
        for row in self._fresh:
            peer = self._swarm.peers[self._observers[row]]
            for other, status in world.believes(peer).items():
                subject = self._swarm.numbers.get(other)
                live = status in (Status.ALIVE, Status.SUSPECT)
                if subject is not None and live and subject != self._observers[row]:
                    self._note(now, row, subject, 1)
        self._fresh.clear()

    def _ask_for_scopes(self, world: World) -> None:
        if self._scope is None:
            return
        peers = self._swarm.peers
        for _ in range(min(self.watched, max(1, _SCOPE_QUESTIONS_MAX // self._size))):
            row, self._next_scope = self._next_scope, (self._next_scope + 1) % self.watched
            observer = peers[self._observers[row]]
            if world.is_up(observer):
                self._scope[row] = [world.in_scope(observer, other) for other in peers]


def _share(parts: npt.NDArray[np.int64], wholes: npt.NDArray[np.int64]) -> float:
    total = int(wholes.sum())
    return int(parts.sum()) / total if total else 0.0
