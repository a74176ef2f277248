"""Intercept the questions that runs ask other nodes, for tests in which a node dies at a certain question."""

from collections.abc import Awaitable, Callable

from crypto.identity import PeerId
from node.protocols import runs as wire
from node.runs.runs import Runs
from node.seams import Parts

Ask = Callable[[], Awaitable[wire.Reply]]
Heard = Callable[[PeerId, PeerId, wire.Request, Ask], Awaitable[wire.Reply]]
"""Receives the asking peer, the asked peer, the question, and a function that really asks it."""


def asking_through(heard: Heard) -> Parts:
    """Return replacement classes for nodes, so that all questions of their runs go through `heard`."""

    class HeardRuns(Runs):
        async def ask(self, peer: PeerId, request: wire.Request, seconds: float) -> wire.Reply:
            ask = super().ask
            return await heard(self.signer.peer, peer, request, lambda: ask(peer, request, seconds))

    return {Runs: HeardRuns}
