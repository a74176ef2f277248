"""The player of records of `node.recording`: given the same calls (turns), the same cores must do the same.

A turn is one call of a core. Only the file is consulted: it holds the time of each turn, signatures, and all
other answers that a core was given. So a record shows on any machine whether these cores still behave as they
did. The player stops at the first turn that differs, because all later turns depend on it.

A file may come from an unknown person, so only the cores named here are made, and only their public methods
are called.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crypto.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from crypto.identity import peer_text
from dht.kademlia import Kademlia
from gossip import member as membership
from gossip.pieces.swarm import PieceSwarm
from gossip.swim import Swim
from node import runtime
from node.protocols.manifest import run_text
from node.recording import values
from node.recording.blocks import Damage, read_blocks
from node.recording.recorder import OUTBOXES, PARTS, Handed, outcome
from node.recording.values import Unrecordable, read
from partition.plan.paxos import PaxosChain
from partition.run.events import StateChanged
from partition.run.member import Member
from partition.steps.committer import Committer
from partition.steps.feeder import Feeder
from partition.steps.replica import Replica

CORES = {
    f"{kind.__module__}:{kind.__qualname__}": kind
    for kind in (Committer, Feeder, Kademlia, Member, PaxosChain, PieceSwarm, Replica, Swim)
}
LOADED = runtime
"""Loads a whole node, because the types of all values are looked up among loaded modules."""
RAISED = {kind.__name__: kind for kind in (LocalProtocolError, ProtocolError, RemoteProtocolError)}
ITEM_BYTES_MAX = 64 << 20
TELLING = {
    membership.MemberUp: "MemberJoined",
    membership.MemberChanged: "MemberJoined",
    membership.MemberSuspected: "MemberSuspected",
    membership.MemberRefuted: "MemberRefuted",
    membership.MemberDown: "MemberLost",
    membership.MemberLeft: "MemberLeft",
}
"""The event for people that reports each membership event."""


class ReplayDiverged(Exception):
    """A core did not do what was recorded."""


class RecordingBroken(Exception):
    """The file was not written by a recorder."""


@dataclass
class Played:
    """The outcome of one record. `diverged` and `damage` are empty if everything went as recorded."""

    about: dict[str, Any] = field(default_factory=dict)
    turns: Counter[str] = field(default_factory=Counter)
    events: list[dict[str, Any]] = field(default_factory=list)
    learnt: int = 0
    derived: int = 0
    first: float | None = None
    now: float = 0.0
    over: str = ""
    diverged: str = ""
    damage: str = ""

    @property
    def seconds(self) -> float:
        """Return how long the node was recorded, by the node's own clock."""
        return 0.0 if self.first is None else self.now - self.first

    @property
    def is_same(self) -> bool:
        """Return whether every turn came out as recorded."""
        return not (self.diverged or self.damage)


def play(path: Path, on_event: Callable[[dict[str, Any]], None] | None = None) -> Played:
    """Replay a file to its end, or to the first turn that differs. Raises OSError."""
    player = _Player(_items(path.read_bytes()), on_event)
    return player.play()


def _items(data: bytes) -> Iterator[Any]:
    """Yield the items of the file in order; a Damage ends them."""
    for block in read_blocks(data):
        if isinstance(block, Damage):
            yield block
            return
        at = 0
        while at < len(block):
            length = int.from_bytes(block[at : at + 4], "little")
            if length > min(ITEM_BYTES_MAX, len(block) - at - 4):
                raise RecordingBroken("an item is longer than its block")
            try:
                item = values.decode(block[at + 4 : at + 4 + length])
            except ValueError as error:
                raise RecordingBroken(f"an item is not MessagePack: {error}") from None
            at += 4 + length
            if not (isinstance(item, list) and item):
                raise RecordingBroken("a malformed item")
            yield item


class _Player:
    def __init__(self, items: Iterator[Any], on_event: Callable[[dict[str, Any]], None] | None) -> None:
        self._items = items
        self._on_event = on_event
        self._cores: dict[int, Any] = {}
        self._played = Played()
        self._turn = ""
        self._handed = Handed()
        self._to_tell: Counter[tuple[str, str]] = Counter()
        self._planned: set[str] = set()
        self._held: set[str] = set()

    def play(self) -> Played:
        played = self._played
        try:
            while not played.over:
                item = next(self._items, None)
                if item is None:
                    break
                self._do(item)
        except ReplayDiverged as error:
            played.diverged = f"turn {played.turns.total()}, {self._turn}: {error}"
        except (RecordingBroken, Unrecordable, IndexError, KeyError, TypeError, ValueError) as error:
            text = (
                f"{type(error).__name__}: {error}" if not isinstance(error, RecordingBroken) else str(error)
            )
            played.damage = (
                f"after turn {played.turns.total()} ({self._turn or 'the beginning'}): {text[:300]}"
            )
        return played

    def _do(self, item: Any) -> None:
        played = self._played
        if isinstance(item, Damage):
            raise RecordingBroken(item.text)
        match item:
            case ["node", dict() as about]:
                played.about = about
                played.first = played.now = float(about["monotonic"])
            case ["event", dict() as document]:
                self._told(document)
            case ["make", int() as number, str() as name, given, named]:
                self._make(number, name, given, named)
            case ["call", int() as number, str() as name, given, named]:
                self._call(number, name, given, named)
            case ["set", int() as number, str() as path, value]:
                core, name = self._find(number, path)
                setattr(core, name, self._read(value))
            case ["gone", int() as number]:
                self._cores.pop(number, None)
            case ["over", str() as reason]:
                played.over = reason
            case ["answer", int(), str() as name, _]:
                raise ReplayDiverged(f"the core does not ask for {name or 'what it asked for'} any more")
            case _:
                raise RecordingBroken(f"an item of the unknown kind {str(item[0])[:40]!r}")

    # Turns

    def _make(self, number: int, name: str, given: Any, named: Any) -> None:
        kind = CORES.get(name)
        if kind is None:
            raise RecordingBroken(f"this version cannot replay {name[:80]}")
        self._begin(kind.__name__, "made", given)
        arguments, by_name = self._read(given), self._read(named)
        core = self._cores[number] = kind(*arguments, **by_name)
        self._end(core, None)

    def _call(self, number: int, path: str, given: Any, named: Any) -> None:
        whole = self._cores[number]
        core, name = self._find(number, path)
        arguments, by_name = self._read(given), self._read(named)
        self._begin(type(whole).__name__, path, arguments)
        method = getattr(core, name)
        try:
            returned = method(*arguments, **by_name)
        except ProtocolError as error:
            returned = ["raised", type(error).__name__, str(error)]
        except (ReplayDiverged, RecordingBroken):
            raise
        except Exception as error:
            raise ReplayDiverged(f"it fails: {type(error).__name__}: {error}") from error
        self._end(whole, returned)
        self._handed.note(returned)

    def _begin(self, kind: str, name: str, given: Any) -> None:
        played = self._played
        played.turns[kind] += 1
        if isinstance(given, list | tuple) and given and isinstance(given[0], float):
            played.now = max(played.now, given[0])
        what = f" of {type(given[2]).__name__}" if name == "receive" and len(given) > 2 else ""
        self._turn = f"{kind}.{name}{what} at {played.seconds:.3f} s"

    def _end(self, core: Any, returned: Any) -> None:
        """Compare the outcome of a turn with the record, and empty the lists that the core's shell would have
        emptied."""
        item = next(self._items, None)
        while item is not None and not isinstance(item, Damage) and item[0] != "end":
            self._do(item)
            item = next(self._items, None)
        if item is None:
            raise RecordingBroken("the record ends within a turn")
        if isinstance(item, Damage):
            raise RecordingBroken(item.text)
        _, events, sent, digest = item
        now_events, now_sent, now_digest = outcome(core, {}, returned, self._refer)
        if now_digest != digest or now_events != events:
            raise ReplayDiverged(_difference((events, sent), (now_events, now_sent)))
        self._played.learnt += len(now_events)
        for event in getattr(core, "events", ()):
            told = TELLING.get(type(event))
            if told is not None:
                self._to_tell[told, peer_text(event.peer)] += 1
            elif isinstance(event, StateChanged):
                self._to_tell["RunChanged", event.state] += 1
        for box in OUTBOXES:
            if hasattr(core, box):
                getattr(core, box).clear()
        if isinstance(core, Member):
            core.asks.take()

    def _told(self, document: dict[str, Any]) -> None:
        """Compare an event for people with the events of the cores in this replay."""
        kind, played = str(document.get("kind")), self._played
        if kind == "RunPlanned":
            self._planned.add(str(document.get("run")))
        elif kind == "RunRevised":
            runs = self._held.add if document.get("is_paused") else self._held.discard
            runs(str(document.get("run")))
        if kind in TELLING.values() or kind == "RunChanged":
            what = kind, str(document.get("state" if kind == "RunChanged" else "peer"))
            if self._to_tell[what]:
                self._to_tell[what] -= 1
                played.derived += 1
            elif kind != "RunChanged" or not self._may_say(str(document.get("run")), what[1]):
                raise ReplayDiverged(f"the node reported {kind} {what[1]}, but no core has this event")
        played.events.append(document)
        if self._on_event is not None:
            self._on_event(document)

    def _may_say(self, run: str, state: str) -> bool:
        """Return whether a node's shell may report this state of a run without an event of a core.

        Runs in local mode and runs that wait for a slot have no plan, so no core knows their state. For a run
        with a plan the shell also reports reasons, such as a missed deadline; the state is then that of its
        core, or paused if the requester paused the run.
        """
        if run not in self._planned:
            return True
        members = [
            core for core in self._cores.values() if isinstance(core, Member) and core.plan is not None
        ]
        states = {core.state for core in members if core.plan is not None and run_text(core.plan.run) == run}
        return state in states or (state == "paused" and run in self._held)

    # Values

    def _find(self, number: int, path: str) -> tuple[Any, str]:
        """Return the owner of a method or an attribute: the core, or a part of it that shells may change."""
        core: Any = self._cores[number]
        part, dot, name = path.rpartition(".")
        if name.startswith("_") or (dot and part not in PARTS):
            raise RecordingBroken(f"no part of a core that may be called or changed: {path[:80]}")
        return (getattr(core, part) if dot else core), name

    def _read(self, value: Any) -> Any:
        return read(value, self._resolve)

    def _resolve(self, reference: list[Any]) -> object:
        if reference[0] == "core":
            return self._cores[reference[1]]
        if reference[0] == "handed":
            return self._handed.get(reference[1])
        number = int(reference[1])
        if len(reference) == 2:
            return Replayed(self.answer, number, "")
        return ReplayedObject(self.answer, number, frozenset(map(str, reference[2])))

    def _refer(self, value: object) -> list[Any] | None:
        if isinstance(value, Replayed | ReplayedObject):
            return ["asked", value.asked_number]
        if type(value) in CORES.values():
            return next((["core", number] for number, core in self._cores.items() if core is value), None)
        return None

    def answer(self, number: int, name: str) -> Any:
        """Return the recorded answer to a core's question. Raises ReplayDiverged if the core asked a
        different question in the record."""
        while True:
            item = next(self._items, None)
            if item is None or isinstance(item, Damage) or item[0] == "end":
                if isinstance(item, Damage):
                    raise RecordingBroken(item.text)
                raise ReplayDiverged(
                    f"the core asks for {name or 'something'}, which it did not do in the record"
                )
            if item[0] == "answer":
                break
            self._do(item)
        _, asked, found_name, found = item
        if (asked, found_name) != (number, name):
            raise ReplayDiverged(
                f"the core asks for {name or 'something'}, but asked for "
                f"{found_name or 'something else'} in the record"
            )
        if isinstance(found, list) and found[:1] == ["raised"]:
            raise RAISED[found[1]](found[2])
        return self._read(found)


class Replayed:
    """A function that returns the recorded answers."""

    def __init__(self, answer: Callable[[int, str], Any], number: int, name: str) -> None:
        self.asked_number = number
        self._answer = answer
        self._name = name

    def __call__(self, *given: Any, **named: Any) -> Any:
        del given, named
        return self._answer(self.asked_number, self._name)


class ReplayedObject:
    """An object that gives the recorded answers, such as a signer, whose key was never written."""

    def __init__(self, answer: Callable[[int, str], Any], number: int, names: frozenset[str]) -> None:
        self.asked_number = number
        self._answer = answer
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._names:
            return Replayed(self._answer, self.asked_number, name)
        return self._answer(self.asked_number, name)


def _difference(recorded: tuple[list[Any], str], found: tuple[list[Any], str]) -> str:
    """Describe how the outcome of a turn differs. Events come first, because the rest follows from them."""
    for number, (before, now) in enumerate(zip(recorded[0], found[0], strict=False)):
        if before != now:
            return f"event {number} was {_short(before)} and is {_short(now)}"
    if len(recorded[0]) != len(found[0]):
        longer, said = (recorded, "misses") if len(recorded[0]) > len(found[0]) else (found, "has also")
        return f"it {said} the event {_short(longer[0][min(len(recorded[0]), len(found[0]))])}"
    if recorded[1] != found[1]:
        return f"the core sent [{recorded[1]}] and now sends [{found[1]}]"
    return f"the core's messages or its answer differ: [{found[1]}]"


def _short(value: Any) -> str:
    text = str(value[1:] if isinstance(value, list) and value[:1] == ["of"] else value)
    return text if len(text) <= 160 else text[:157] + "..."
