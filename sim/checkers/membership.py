"""Invariants of membership: member lists become right, no live peer is declared dead, accusations are
refuted."""

from collections import deque

from crypto.identity import PeerId
from gossip.member import MemberDown, MemberUp, Status
from sim.checkers.checker import Checker
from sim.checkers.quiet_period import QuietPeriods, detection_seconds, refutation_seconds
from sim.observers import Observation, World
from sim.scenario import Scenario

_LIVE = (Status.ALIVE, Status.SUSPECT)
_PAIRS_PER_SAMPLE = 4_000
_VIEWS_PER_SAMPLE = 4
"""Number of member lists checked at each sample, in turn, because the cost of a list grows with its size."""
_VIEWS_AT_END = 256


class ViewsConverge(Checker):
    """Check that the member list of a peer is right once the peer has been up and undisturbed for
    `converge_seconds`. It must list exactly the peers in its scope and reach for which the same holds, and
    must not list as live a peer that has been down for that long."""

    name = "membership"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._patience_seconds = scenario.checks.converge_seconds
        self._views = max(1, min(_VIEWS_PER_SAMPLE, _PAIRS_PER_SAMPLE // scenario.nodes))
        self._next = 0
        self._calm = QuietPeriods(scenario)
        self.handlers = self._calm.handlers

    def sample(self, world: World) -> None:
        self._look(world, self._views)

    def end(self, world: World) -> None:
        self._look(world, _VIEWS_AT_END)

    def _look(self, world: World, views: int) -> None:
        latest = world.now - self._patience_seconds
        if latest < 0 or self._calm.network_since(world.now) > latest:
            return
        peers = world.peers
        for _ in range(len(peers)):
            if views == 0:
                return
            viewer = peers[self._next % len(peers)]
            self._next += 1
            if world.is_up(viewer) and self._calm.since(viewer) <= latest:
                views -= 1
                self._check(world, viewer, latest)

    def _check(self, world: World, viewer: PeerId, latest: float) -> None:
        view = world.believes(viewer)
        for peer in world.peers:
            listed = view.get(peer) in _LIVE
            up = world.is_up(peer)
            if listed == up or peer == viewer or self._calm.since(peer) > latest:
                continue
            since = f"since {self._calm.since(peer):.3f} s"
            if listed:
                raise self.broken(
                    f"{world.name(viewer)} lists {world.name(peer)}, which has been down {since}"
                )
            if world.in_scope(viewer, peer) and _connected(world, viewer, peer):
                what = f"{world.name(peer)}, which has been up and reachable {since}"
                raise self.broken(f"{world.name(viewer)} does not list {what}")


class NoFalseDeaths(Checker):
    """Check that no peer declares a peer dead that is up, reachable and undisturbed, and has been for so long
    that the verdict cannot refer to an earlier process of it."""

    name = "false-death"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._patience_seconds = detection_seconds(scenario)
        self._calm = QuietPeriods(scenario)
        self.handlers = {**self._calm.handlers, MemberDown: self._see_down}

    def _see_down(self, observed: Observation, world: World) -> None:
        viewer, subject = observed.peer, observed.event.peer
        if viewer is None or not (world.is_up(subject) and _connected(world, viewer, subject)):
            return
        since = self._calm.both_since(world, viewer, subject)
        if since <= observed.time - self._patience_seconds:
            raise self.broken(
                f"{world.name(viewer)} declares {world.name(subject)} dead ({observed.event.reason}), "
                f"which has been up and reachable since {since:.3f} s"
            )


class DeathsAreRefuted(Checker):
    """Check that each peer that declared a live, reachable peer dead lists it again within the time that a
    refutation takes."""

    name = "refutation"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._patience_seconds = refutation_seconds(scenario)
        self._calm = QuietPeriods(scenario)
        # Wrong verdicts of death: (observer, subject), and since when. The queue holds them by time.
        self._held: dict[tuple[PeerId, PeerId], float] = {}
        self._queue: deque[tuple[float, PeerId, PeerId]] = deque()
        self.handlers = {**self._calm.handlers, MemberDown: self._see_down, MemberUp: self._see_up}

    def _see_down(self, observed: Observation, world: World) -> None:
        viewer, subject = observed.peer, observed.event.peer
        if viewer is not None and world.is_up(subject):
            self._held[viewer, subject] = observed.time
            self._queue.append((observed.time, viewer, subject))

    def _see_up(self, observed: Observation, _world: World) -> None:
        if self._held and observed.peer is not None:
            self._held.pop((observed.peer, observed.event.peer), None)

    def sample(self, world: World) -> None:
        while self._queue and self._queue[0][0] <= world.now - self._patience_seconds:
            since, viewer, subject = self._queue.popleft()
            if self._held.get((viewer, subject)) != since:
                continue
            if not (world.is_up(viewer) and world.is_up(subject) and _connected(world, viewer, subject)):
                del self._held[viewer, subject]
            elif self._calm.both_since(world, viewer, subject) > since:
                # There was a disturbance meanwhile, so start the allowed time again: now, or at the end of
                # the disturbance if that is later.
                later = max(world.now, self._calm.both_since(world, viewer, subject))
                self._held[viewer, subject] = later
                self._queue.append((later, viewer, subject))
            elif world.in_scope(viewer, subject) and world.believes(viewer).get(subject) is Status.DEAD:
                raise self.broken(
                    f"{world.name(viewer)} has listed {world.name(subject)} as dead since {since:.3f} s, "
                    "though it was up and reachable all the time"
                )

    def end(self, world: World) -> None:
        self.sample(world)


def _connected(world: World, one: PeerId, other: PeerId) -> bool:
    return world.reaches(one, other) and world.reaches(other, one)
