"""The averaging runs in which one node takes part, behind one protocol: a roster for each run."""

from collections.abc import Callable
from math import inf
from random import Random

from crypto.identity import PeerId
from gossip.roster import PARTICIPANTS_MAX, Event, Message, NetworkOf, Roster, Sends

RUNS_MAX = 64
"""Maximum number of simultaneous runs of one node."""


class Rosters:
    """All runs of one node, behind one protocol."""

    def __init__(
        self,
        me: PeerId,
        rng: Random,
        *,
        participants_max: int = PARTICIPANTS_MAX,
        network_of: NetworkOf = lambda _peer: None,
    ) -> None:
        """`participants_max` limits how many participants of one run are kept; for `network_of` see
        `Roster`."""
        self._me = me
        self._network_of = network_of
        self._rng = rng
        self._participants_max = participants_max
        self._rosters: dict[bytes, Roster] = {}
        self.events: list[Event] = []

    @property
    def deadline(self) -> float:
        return min((roster.deadline for roster in self._rosters.values()), default=inf)

    def open(
        self,
        run: bytes,
        signature: bytes,
        now: float,
        number: int,
        admits: Callable[[PeerId], bool] | None = None,
    ) -> Roster:
        """Join a run, see `Roster`. Raises ValueError if this node is already in the run, or in too many
        runs."""
        if run in self._rosters:
            raise ValueError("this node already takes part in this run; close it first, or use another name")
        if len(self._rosters) >= RUNS_MAX:
            raise ValueError(f"this node already takes part in {RUNS_MAX} runs; close one first")
        roster = self._rosters[run] = Roster(
            self._me, run, signature, self._rng, now, number, admits, self._participants_max, self._network_of
        )
        return roster

    def close(self, run: bytes) -> Sends:
        """Leave a run."""
        roster = self._rosters.pop(run, None)
        return [] if roster is None else roster.leave()

    def get(self, run: bytes) -> Roster | None:
        """Return the roster of a run that this node takes part in."""
        return self._rosters.get(run)

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Handle one message. A message of an unknown run is ignored."""
        roster = self._rosters.get(message.run)
        if roster is None:
            return []
        sends = roster.receive(now, sender, message)
        self._drain(roster)
        return sends

    def wake(self, now: float) -> Sends:
        """Wake the rosters that are due."""
        sends: Sends = []
        for roster in list(self._rosters.values()):
            if roster.deadline <= now:
                sends += roster.wake(now)
            self._drain(roster)
        return sends

    def lost(self, peer: PeerId) -> Sends:
        """Remove a peer that membership reports as dead from all runs."""
        for roster in self._rosters.values():
            roster.lost(peer)
            self._drain(roster)
        return []

    def _drain(self, roster: Roster) -> None:
        self.events += roster.events
        roster.events.clear()
