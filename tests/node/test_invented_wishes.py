"""Invented runs that ask only once do not fill the queue for slots."""

from types import SimpleNamespace
from typing import Any, cast

from crypto.identity import Identity, PeerId
from node.placement.turns import WAITING_MAX
from node.runs.queue import Queue
from partition.run.asks import Declined


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def queue(clock: Clock) -> Queue:
    """Return a queue for one slot, which is occupied."""
    taken = PeerId(bytes([9]) * 38)
    served = cast("Any", SimpleNamespace(id=b"served", requester=taken))
    runs = SimpleNamespace(
        seams=SimpleNamespace(clock=clock, network=SimpleNamespace(host_of=lambda _: None)),
        signer=SimpleNamespace(peer=Identity(bytes(32)).peer),
        members={},
        live=frozenset,
        slots=SimpleNamespace(taken=lambda: {b"served"}, lapsing=dict),
        receipts=SimpleNamespace(weight=lambda _: 1.0, begun=lambda _: None),
    )
    found = Queue(cast("Any", runs), 1)
    found.begin(served, None)
    return found


def run_of(number: int) -> tuple[PeerId, Any]:
    peer = PeerId(number.to_bytes(4, "big") + bytes(34))
    return peer, SimpleNamespace(id=number.to_bytes(32, "big"), requester=peer)


def test_invented_runs_give_way_to_a_real_one() -> None:
    clock = Clock()
    waiting = queue(clock)
    for number in range(WAITING_MAX):
        waiting.ask(*run_of(number), None)
    honest, run = run_of(WAITING_MAX)
    clock.now = 3.0
    waiting.ask(honest, run, None)
    for _ in range(6):  # for longer than FORGET_SECONDS
        clock.now += 25.0
        for number in range(2 * WAITING_MAX, 2 * WAITING_MAX + 30):
            waiting.ask(*run_of(number + int(100 * clock.now)), None)
        found = waiting.ask(honest, run, None)
        assert isinstance(found, Declined)
        assert run.id in waiting._turns._waiting, "the real run lost its place in the queue"


def test_a_requester_with_many_runs_leaves_room_for_others() -> None:
    clock = Clock()
    waiting = queue(clock)
    greedy, _ = run_of(0)
    answers = []
    for number in range(2 * WAITING_MAX):
        run = SimpleNamespace(id=number.to_bytes(32, "big"), requester=greedy)
        answers.append(waiting.ask(greedy, cast("Any", run), None))
    assert Declined("busy: too many runs wait") in answers
    honest, run = run_of(5_000)
    assert waiting.ask(honest, run, None) != Declined("busy: too many runs wait")
