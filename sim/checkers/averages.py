"""The invariant of averaging: each peer that reports success names the members, and all these reports
agree."""

from crypto.identity import PeerId
from sim.checkers.checker import Checker
from sim.events import Averaged, PeerStarted
from sim.observers import Observation, World


class AveragesAgree(Checker):
    """Check that all peers that report success for one attempt took part in it, name the same set with each
    member once, and hold the same bytes. Check also that every named peer has run at some time."""

    name = "averages"

    def __init__(self) -> None:
        super().__init__()
        self._reports: dict[tuple[bytes, int], tuple[frozenset[PeerId], bytes, PeerId]] = {}
        self._ran: dict[PeerId, None] = {}
        self.handlers = {Averaged: self._see_averaged, PeerStarted: self._see_started}

    def _see_started(self, observed: Observation, _world: World) -> None:
        if observed.peer is not None:
            self._ran[observed.peer] = None

    def _see_averaged(self, observed: Observation, world: World) -> None:
        event, peer = observed.event, observed.peer
        if peer is None:
            return
        entered = frozenset(event.entered)
        which = f"attempt {event.attempt} of round {event.round.hex()[:8]}, as reported by {world.name(peer)}"
        if len(entered) < len(event.entered):
            raise self.broken(f"a member is named twice in {which}")
        if peer not in entered:
            raise self.broken(f"the reporting peer is not a member in {which}")
        ghosts = [world.name(named) for named in event.entered if named not in self._ran]
        if ghosts:
            raise self.broken(f"{ghosts[0]} never ran, but is a member in {which}")
        others, digest, first = self._reports.setdefault(
            (event.round, event.attempt), (entered, event.digest, peer)
        )
        if others != entered:
            odd = sorted(world.name(named) for named in others ^ entered)
            raise self.broken(f"{world.name(first)} and a second peer disagree about {odd[0]} in {which}")
        if digest != event.digest:
            raise self.broken(f"{world.name(first)} holds different bytes after {which}")
