"""How soon the swarm notices that a peer is gone, and how often it suspects a live peer.

For each crash, three times are measured: until the first suspicion by any peer, until the first verdict of
death, and until no watched peer lists the crashed one. A false suspicion counts once, at the peer that signed
it, not at each peer that hears of it. Verdicts on one peer by many observers count as one false death.
"""

from collections import Counter
from dataclasses import dataclass

from gossip.member import MemberDown, MemberSuspected
from sim.events import PeerStarted, PeerStopped
from sim.measures.rows import Row, quantiles
from sim.measures.swarm import Swarm
from sim.measures.views import Views
from sim.observers import Observation, World

SAME_DEATH_SECONDS = 30.0
"""Verdicts on one peer within this time count as one mistake made by several observers."""
JUST_BACK_SECONDS = 10.0
"""For this long after a peer's return, a suspicion or a verdict of death is excused, because it may refer to
its previous process."""


@dataclass
class _Crash:
    at: float
    listing: int
    suspected: bool = False
    dead: bool = False


class Detection:
    """Metrics with one row per crash, labelled with the peer: `crash_suspected_seconds`,
    `crash_dead_seconds`, `crash_known_to_all_seconds`. Metrics with one row per mistake, labelled with its
    excuse (`frozen`, `cut off`, `just back`, or empty): `false_suspicion`, `false_death`."""

    def __init__(self, swarm: Swarm, world: World, rows: list[Row]) -> None:
        self._swarm = swarm
        self._world = world
        self._rows = rows
        self._views: Views | None = None
        self._open: dict[int, _Crash] = {}
        self._took: dict[str, list[float]] = {"suspected": [], "dead": [], "known_to_all": []}
        self._false: Counter[tuple[str, str]] = Counter()
        self._back_at: dict[int, float] = {}
        self._died_at: dict[tuple[int, str], float] = {}
        self.handlers = {
            PeerStarted: self._started,
            PeerStopped: self._stopped,
            MemberSuspected: self._suspected,
            MemberDown: self._down,
        }

    def follow(self, views: Views) -> None:
        """Use `views` to find out which peers list which."""
        self._views = views

    def follows(self, subject: int) -> bool:
        return subject in self._open

    def listed(self, now: float, subject: int, change: int) -> None:
        self._count(now, subject, self._open[subject].listing + change)

    def recount(self, now: float) -> None:
        """Count again. If scopes move, the peers that should list each other change without an event."""
        assert self._views is not None
        for subject in list(self._open):
            self._count(now, subject, self._views.listing(subject))

    def _count(self, now: float, subject: int, listing: int) -> None:
        crash = self._open[subject]
        crash.listing = listing
        if listing == 0:
            self._note(now, subject, "known_to_all", crash)
            del self._open[subject]

    def summary(self) -> dict[str, object]:
        return {
            **{f"{what}_seconds": quantiles(values) for what, values in self._took.items()},
            **{f"{what}_crashes": len(values) for what, values in self._took.items()},
            "false_suspicions": self._false["suspicion", ""],
            "false_deaths": self._false["death", ""],
            "excused_suspicions": self._excused("suspicion"),
            "excused_deaths": self._excused("death"),
        }

    def _excused(self, what: str) -> int:
        return sum(count for (kind, why), count in self._false.items() if kind == what and why)

    def _stopped(self, observed: Observation) -> None:
        assert observed.peer is not None
        assert self._views is not None
        subject = self._swarm.numbers[observed.peer]
        if observed.event.why == "leave":
            return
        listing = self._views.listing(subject)
        if listing:
            self._open[subject] = _Crash(observed.time, listing)

    def _started(self, observed: Observation) -> None:
        assert observed.peer is not None
        # The peer returned before all had noticed its crash. The times that are still missing are never
        # measured.
        number = self._swarm.numbers[observed.peer]
        self._open.pop(number, None)
        self._back_at[number] = observed.time

    def _suspected(self, observed: Observation) -> None:
        self._accused(observed, "suspicion")

    def _down(self, observed: Observation) -> None:
        self._accused(observed, "death")

    def _accused(self, observed: Observation, what: str) -> None:
        event = observed.event
        subject = self._swarm.numbers.get(event.peer)
        if subject is None:
            return
        crash = self._open.get(subject)
        if crash is not None:
            if not crash.suspected:
                crash.suspected = True
                self._note(observed.time, subject, "suspected", crash)
            if what == "death" and not crash.dead:
                crash.dead = True
                self._note(observed.time, subject, "dead", crash)
        elif self._swarm.up[subject] and observed.peer == event.accuser:
            self._mistaken(observed, subject, what, self._excuse(observed, subject))

    def _mistaken(self, observed: Observation, subject: int, what: str, why: str) -> None:
        if what == "death":
            before = self._died_at.get((subject, why), -SAME_DEATH_SECONDS)
            self._died_at[subject, why] = observed.time
            if observed.time < before + SAME_DEATH_SECONDS:
                return
        self._false[what, why] += 1
        self._rows.append(Row(observed.time, f"false_{what}", why, 1))

    def _excuse(self, observed: Observation, subject: int) -> str:
        accuser, accused = observed.event.accuser, observed.event.peer
        world = self._world
        if not (world.reaches(accuser, accused) and world.reaches(accused, accuser)):
            return "cut off"
        if observed.time < self._back_at[subject] + JUST_BACK_SECONDS:
            return "just back"
        number = self._swarm.numbers[accuser]
        frozen = self._swarm.is_frozen(subject, observed.time) or self._swarm.is_frozen(number, observed.time)
        return "frozen" if frozen else ""

    def _note(self, now: float, subject: int, what: str, crash: _Crash) -> None:
        name = self._world.name(self._swarm.peers[subject])
        self._took[what].append(now - crash.at)
        self._rows.append(Row(now, f"crash_{what}_seconds", name, now - crash.at))
