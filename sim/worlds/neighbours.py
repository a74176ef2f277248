"""Neighbourhood lists: neighbours that SWIM does not know are looked up in the DHT and then joined."""

from typing import Any

from dht.events import NodesFound
from dht.keys import Key
from dht.messages import PROTOCOL as KADEMLIA
from gossip.member import NeighbourhoodLookupWanted
from gossip.swim import PROTOCOL as SWIM
from node.services.driver import Sends
from sim.events import PeerStopped
from sim.worlds.life import Life, WorldEnvironment


class WorldNeighbours:
    """The part of a world that looks up neighbours."""

    def __init__(self, ground: WorldEnvironment) -> None:
        self._ground = ground
        self._sought: dict[Life, dict[int, None]] = {}
        ground.on(NeighbourhoodLookupWanted, self._wanted)
        ground.on(NodesFound, self._found)
        ground.on(PeerStopped, self._stopped)

    def _wanted(self, life: Life, event: NeighbourhoodLookupWanted) -> None:
        def locate(core: Any, now: float) -> Sends:
            number, sends = core.locate(now, Key(event.key))
            self._sought.setdefault(life, {})[number] = None
            made: Sends = sends
            return made

        self._ground.command(life, KADEMLIA, locate)

    def _found(self, life: Life, event: NodesFound) -> None:
        sought = self._sought.get(life, {})
        if event.request in sought:
            del sought[event.request]
            if event.peers and not life.leaving:
                self._ground.command(life, SWIM, lambda core, now: core.join(now, event.peers))

    def _stopped(self, life: Life, event: PeerStopped) -> None:
        del event
        self._sought.pop(life, None)
