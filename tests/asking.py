"""Runs whose questions to other nodes a test hears, for one that dies at a certain question."""

from collections.abc import Awaitable, Callable

from crypto.identity import PeerId
from node.protocols import runs as wire
from node.runs.runs import Runs
from node.seams import Parts

Ask = Callable[[], Awaitable[wire.Reply]]
Heard = Callable[[PeerId, PeerId, wire.Request, Ask], Awaitable[wire.Reply]]
"""Hears who asks, who is asked, and the question; awaits the last to ask it."""


def asking_through(heard: Heard) -> Parts:
    """Return the classes of nodes whose questions go through `heard`."""

    class HeardRuns(Runs):
        async def ask(self, peer: PeerId, request: wire.Request, seconds: float) -> wire.Reply:
            ask = super().ask
            return await heard(self.signer.peer, peer, request, lambda: ask(peer, request, seconds))

    return {Runs: HeardRuns}
