"""Which result is on a member's disk if a run in local mode has several conclusions."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from blake3 import blake3

from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from node.averaging.door import TicketGate
from node.checkpoints.weights import digest_of, weights_name
from node.local import results as module
from node.local.member import LocalMember
from node.protocols.manifest import make_run
from partition.run.admission import Admission
from partition.run.conclusions import Conclusion, Said, Sends
from partition.run.ending import Ending
from partition.run.local_settings import LocalSettings
from sim.seams import SimClock
from sim.storage import MemoryStorage
from sim.worlds.scheduling import run_virtually
from tests import stack

ME, OTHER, THIRD = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
OLD, NEW = b"the model of a conclusion that is given up", b"the model that all settle on"
SECONDS = {OLD: 5.0, NEW: 1.0}
"""Seconds that it takes to fetch each result."""


def test_a_slow_fetch_of_an_abandoned_result_keeps_the_settled_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    results = {blake3(data).hexdigest(): data for data in (OLD, NEW)}

    async def fetch_slowly(service: object, run: Any, source: PeerId, weights: str) -> str:
        del service, source
        await trio.sleep(SECONDS[results[weights]])
        storage.write(weights_name(run.text), results[weights])
        return ""

    async def play() -> None:
        run = make_run(IdentitySigner(ME, "tests"), stack.manifest(stages=1, local=LocalSettings()))
        ending = Ending(ME.peer, run.id, LocalSettings())
        ending.set_peers(0.0, [OTHER.peer, THIRD.peer])
        admission = Admission(IdentitySigner(ME, "tests"), run.id, run.requester, ())
        door = TicketGate(admission, SimClock(), lambda _: None)
        member = LocalMember(_service(storage), run, ending, door, is_training=True, holders=[], tell=_tell)
        first, second = (
            Conclusion(run.id, "done", "", step, blake3(data).hexdigest(), author.peer)
            for step, data, author in ((10, OLD, OTHER), (20, NEW, THIRD))
        )
        async with trio.open_nursery() as nursery:
            for conclusion, sender in ((first, OTHER), (second, THIRD)):
                ending.receive(0.0, sender.peer, Said(run.id, conclusion, holds=True, is_settled=False))
                nursery.start_soon(member.results.fetch, conclusion)
                await trio.sleep(2.0)
        assert ending.best == second
        assert ending.is_here, "the settled result is missing on the member's disk"
        assert digest_of(storage, run.text) == second.weights

    monkeypatch.setattr(module, "fetch_result", fetch_slowly)
    run_virtually(play)


def _tell(ending: Ending, order: Callable[[float], Sends]) -> None:
    del ending
    order(0.0)


def _service(storage: MemoryStorage) -> Any:
    async def work(function: partial[Any]) -> Any:
        return function()

    executor = SimpleNamespace(run=work)
    seams = SimpleNamespace(storage=storage, executor=executor, clock=SimClock())
    return SimpleNamespace(signer=ME, seams=seams, publish=lambda event: None)
