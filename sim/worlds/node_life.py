"""One life of a whole node in a stack: from its start to its crash, or to the end of its goodbye."""

from functools import partial
from typing import Any

import trio

from crypto.facts import Signer
from dht.kademlia import Kademlia
from gossip.swim import Swim
from node.runtime import Node
from node.seams import Parts
from sim.worlds.factories import Cores
from sim.worlds.life import Life


class NodeLife(Life):
    """One life of a whole node. `swim` and `kademlia` are the cores that `node` drives; they exist after the
    first instant."""

    __slots__ = ("_bye", "_scope", "node")

    def __init__(self, number: int, serial: int, since: float, signer: Signer) -> None:
        super().__init__(number, serial, since, signer)
        self.node: Node
        self._scope = trio.CancelScope()
        self._bye = trio.Event()

    def parts(self, cores: Cores) -> Parts:
        """Return the makers of the node's cores. They use those of `cores`, and record the cores here."""
        kinds: dict[type, str] = {Swim: "swim", Kademlia: "kademlia"}
        return {kind: partial(self._make, name, cores) for kind, name in kinds.items()}

    def _make(self, name: str, cores: Cores, *arguments: Any, **options: Any) -> Any:
        core = getattr(cores, name)(*arguments, **options)
        setattr(self, name, core)
        return core

    async def run(self) -> None:
        """Run until this life is ended."""
        with self._scope:
            async with self.node:
                await self._bye.wait()

    def leave(self) -> None:
        """Hand over the node's work, say goodbye, and end."""
        self.leaving = True
        self._bye.set()

    def crash(self) -> None:
        """End immediately."""
        self._scope.cancel()
