"""The script of a world: arrivals and departures of peers, and the events of the scenario. Pure."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, Protocol

from sim.churn.disturbances import Disturbance, disturbances, late_numbers
from sim.churn.schedule import PopulationChange, changes
from sim.scenario import Scenario
from sim.seeds import draw_share


class Directed(Protocol):
    """A world that the script directs. Peers are given by number."""

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None: ...

    def runs(self, number: int) -> bool:
        """Return whether this peer runs and is not about to leave."""

    def start(self, number: int) -> None:
        """Start a peer, unless it runs. If its previous goodbye is still in progress, call `Direction.ended`
        at its end."""

    def stop(self, number: int, why: str) -> None:
        """Stop a peer: immediately, or with a goodbye if `why` is leave."""

    def split(self, side_of: Mapping[int, int]) -> None:
        """Let only peers on the same side reach each other; unnamed peers are on side 0. If `side_of` is
        empty, all reach each other."""

    def deafen(self, number: int, deaf: bool) -> None:
        """Block all messages to this peer or, if not `deaf`, let them pass again."""

    def block_datagrams(self, number: int, blocked: bool) -> None:
        """Block all datagrams from and to this peer, or let them pass again. Streams always pass."""

    def lose(self, number: int, loss: float) -> None:
        """Lose this additional share of the peer's messages."""

    def reboot(self, number: int) -> None:
        """Clear all mappings of the router in front of this peer."""

    def freeze(self, number: int, seconds: float) -> None: ...
    def slow(self, number: int, factor: float) -> None: ...


class Direction:
    """Directs `world` from `begin` on. `region_of` returns the region of a peer's number."""

    def __init__(
        self, world: Directed, scenario: Scenario, seed: int, region_of: Callable[[int], str]
    ) -> None:
        self._world = world
        self._scenario = scenario
        self._seed = seed
        nodes, churn = scenario.nodes, scenario.churn
        self._arrived = bytearray(nodes)
        self._present = bytearray(b"\1" * nodes)
        self._held = array("H", bytes(2 * nodes))
        self._changes: Iterator[PopulationChange] = changes(churn, nodes, scenario.seconds, seed)
        self._disturbances = disturbances(
            scenario.events,
            nodes=nodes,
            seconds=scenario.seconds,
            seed=seed,
            churn=churn,
            late_share=scenario.start.late_share,
            region_of=region_of,
        )
        self._cuts: dict[Disturbance, None] = {}
        # The active disturbances of each kind, by peer.
        self._active: dict[tuple[str, int], list[Disturbance]] = {}

    def begin(self) -> None:
        """Schedule all changes and events."""
        scenario = self._scenario
        self._plan_change()  # changes at time 0 are made now, before any peer starts
        late = late_numbers(scenario.nodes, scenario.start.late_share, scenario.churn.permanent)
        for number in range(scenario.nodes):
            if number not in late:
                self._world.at(start_seconds(scenario, self._seed, number), self._arrive, number)
        self._plan_disturbance()

    def ended(self, number: int) -> None:
        """Handle the end of a goodbye."""
        self._settle(number, "leave")

    # Running peers

    def _arrive(self, number: int) -> None:
        self._arrived[number] = True
        self._settle(number, "")

    def _plan_change(self) -> None:
        for change in self._changes:
            if change.time > 0:
                self._world.at(change.time, self._change, change)
                return
            self._present[change.number] = change.up

    def _change(self, change: PopulationChange) -> None:
        self._plan_change()
        self._present[change.number] = change.up
        self._settle(change.number, change.why)

    def _settle(self, number: int, why: str) -> None:
        """Start or stop a peer, if its state differs from the intended one."""
        if self._arrived[number] and self._present[number] and not self._held[number]:
            self._world.start(number)
        elif self._world.runs(number):
            self._world.stop(number, why)

    # Events

    def _plan_disturbance(self) -> None:
        disturbance = next(self._disturbances, None)
        if disturbance is not None:
            self._world.at(disturbance.begins, self._disturb, disturbance)

    def _disturb(self, disturbance: Disturbance) -> None:
        self._plan_disturbance()
        running = [number for number in disturbance.numbers if self._world.runs(number)]
        match disturbance.kind:
            case "join":
                for number, at in zip(disturbance.numbers, disturbance.starts, strict=True):
                    self._world.at(at, self._arrive, number)
            case "crash" | "leave":
                self._hold(running, 1, disturbance.kind)
                self._world.at(disturbance.ends, self._hold, running, -1, disturbance.kind)
            case "restart":
                self._hold(running, 1, disturbance.kind)
                self._hold(running, -1, disturbance.kind)
            case "partition":
                self._cuts[disturbance] = None
                self._cut()
                self._world.at(disturbance.ends, self._mend, disturbance)
            case "reboot":
                for number in running:
                    self._world.reboot(number)
            case "freeze":
                for number in running:
                    self._world.freeze(number, disturbance.ends - disturbance.begins)
            case _:
                self._affect(disturbance, True)
                self._world.at(disturbance.ends, self._affect, disturbance, False)

    def _hold(self, numbers: list[int], by: int, why: str) -> None:
        for number in numbers:
            self._held[number] += by
            self._settle(number, why)

    def _mend(self, disturbance: Disturbance) -> None:
        del self._cuts[disturbance]
        self._cut()

    def _cut(self) -> None:
        """Let peers reach each other if they are on the same side of every cut."""
        names: dict[tuple[int, ...], int] = {(): 0}
        cuts_of: dict[int, tuple[int, ...]] = {}
        for index, cut in enumerate(self._cuts):
            for number in cut.numbers:
                cuts_of[number] = (*cuts_of.get(number, ()), index)
        self._world.split({number: names.setdefault(cuts, len(names)) for number, cuts in cuts_of.items()})

    def _affect(self, disturbance: Disturbance, begins: bool) -> None:
        kind, world = disturbance.kind, self._world
        for number in disturbance.numbers:
            active = self._active.setdefault((kind, number), [])
            if begins:
                active.append(disturbance)
            else:
                active.remove(disturbance)
            if kind == "one-way":
                world.deafen(number, bool(active))
            elif kind == "no-datagrams":
                world.block_datagrams(number, bool(active))
            elif kind == "slow":
                world.slow(number, prod(one.factor for one in active))
            else:
                world.lose(number, 1 - prod(1 - one.loss for one in active))
            if not active:
                del self._active[kind, number]


def start_seconds(scenario: Scenario, seed: int, number: int) -> float:
    """Return when a peer first starts: the first peer immediately, the others spread uniformly."""
    if number == 0:
        return 0.0
    return scenario.start.spread_seconds * draw_share(seed, "start", number)
