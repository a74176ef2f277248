"""Reachability of bare cores, like `node.services.autonat`: a peer that others cannot reach becomes a DHT
client.

A node's own core makes the judgement. The links at that instant decide a dial-back: it takes as long as a
node's, and succeeds if a stream could be opened; no peer is too busy for one. As on the simulated network, a
peer with a public address knows that it is reachable and asks no other peer.
"""

from typing import Any

from crypto.identity import PeerId
from dht.messages import PROTOCOL as KADEMLIA
from node.services.autonat import DIAL_SECONDS
from node.services.autonat_core import DialReport, Reachability
from node.services.driver import Sends
from node.transport.handshake import CONNECT_SECONDS
from sim.events import PeerStarted, ReachabilityJudged
from sim.network.addresses import outer_address
from sim.network.instants import after
from sim.peer_network import HANDSHAKE_TRIPS
from sim.seeds import seeded_rng
from sim.worlds.joining import DialGround, handshake, live_others
from sim.worlds.life import Life


class Reaching:
    """The reachability of all peers of a world."""

    def __init__(self, ground: DialGround) -> None:
        self._ground = ground
        ground.on(PeerStarted, self._started)

    def _started(self, life: Life, event: PeerStarted) -> None:
        del event
        place = self._ground.links.at(life.peer)
        if place.nat is not None or (place.machine is not None and place.machine.site is not None):
            rng = seeded_rng(self._ground.seed, "reach", life.peer, life.serial)
            judge = Reachability(rng, self._ground.now)
            self._ground.at(judge.deadline, self._ask, life, judge)

    def _lives(self, life: Life) -> bool:
        return self._ground.lives.get(life.peer) is life

    def _ask(self, life: Life, judge: Reachability) -> None:
        if not self._lives(life):
            return
        now = self._ground.now
        other = judge.next(now, live_others(life))
        if other is None:
            self._ground.at(judge.deadline, self._ask, life, judge)
        else:
            connected = after(now, self._handshake_seconds(life.peer, other))
            self._ground.at(connected, self._connected, life, judge, other, after(now, CONNECT_SECONDS))

    def _connected(self, life: Life, judge: Reachability, other: PeerId, give_up: float) -> None:
        """Handle the end of the asking peer's handshake, unless no answer came."""
        if not self._lives(life):
            return
        ground, links = self._ground, self._ground.links
        answer = handshake(ground, life.peer, other)
        if answer != "ok":
            due = max(ground.now, give_up) if answer == "timeout" else ground.now
            ground.at(due, self._failed, life, judge, other)
            return
        asked = after(ground.now, links.latency_seconds(life.peer, other))
        found = after(asked, min(self._handshake_seconds(other, life.peer), DIAL_SECONDS))
        ground.at(found, self._dialled, life, judge, other, after(asked, DIAL_SECONDS))

    def _dialled(self, life: Life, judge: Reachability, other: PeerId, give_up: float) -> None:
        """Handle the end of a dial-back that succeeded or will time out."""
        ground = self._ground
        if not self._lives(life):
            return
        answer = handshake(ground, other, life.peer)
        said = max(ground.now, give_up) if answer == "timeout" else ground.now
        told = after(said, ground.links.latency_seconds(other, life.peer))
        ground.at(told, self._answered, life, judge, other, "" if answer == "ok" else answer)

    def _answered(self, life: Life, judge: Reachability, other: PeerId, reason: str) -> None:
        if not self._lives(life):
            return
        ground = self._ground
        if handshake(ground, life.peer, other) != "ok":
            self._failed(life, judge, other)  # the peer has stopped meanwhile
            return
        outside = outer_address(life.number, life.peer)
        # The address does not matter, because here a peer is reached by its id.
        judge.answered(ground.now, other, DialReport(ground.now, None, ((outside, reason),)))
        is_client = judge.verdict is False

        def appear(core: Any, now: float) -> Sends:
            del now
            core.appear((outside,), client=is_client)
            return []

        ground.command(life, KADEMLIA, appear)
        ground.tell(life, ReachabilityJudged(judge.verdict, judge.asked))
        ground.at(judge.deadline, self._ask, life, judge)

    def _failed(self, life: Life, judge: Reachability, other: PeerId) -> None:
        if self._lives(life):
            judge.failed(self._ground.now, other)
            self._ground.at(judge.deadline, self._ask, life, judge)

    def _handshake_seconds(self, one: PeerId, other: PeerId) -> float:
        links = self._ground.links
        return HANDSHAKE_TRIPS / 2 * (links.latency_seconds(one, other) + links.latency_seconds(other, one))
