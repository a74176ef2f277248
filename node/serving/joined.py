"""The wiring of services into a node: services share the slots and models of the node's runs."""

from collections.abc import Sequence
from typing import Any, Protocol

from crypto.identity import PeerId, peer_text
from node.checkpoints.service import Checkpoints
from node.errors import UsageError
from node.events import Event
from node.placement.provider import Provider
from node.runs.runs import Runs
from node.seams import Seams
from node.services.discovery import Discovery
from node.services.membership import Membership
from node.serving.needs import ServingMachine, ServingSwarm
from node.serving.serving import Serving
from node.state import State
from partition.serve.bounds import NO_BOUNDS, PeerBounds

INVITED = "invited"
"""The word that stands for all peers that this node's owner lists."""


class ServingNode(Protocol):
    """The part of `node.runtime.Node` that this file uses."""

    peer: PeerId
    seams: Seams
    signer: Any
    discovery: Discovery
    membership: Membership
    provider: Provider
    runs: Runs
    checkpoints: Checkpoints

    @property
    def state(self) -> State: ...

    def publish(self, event: Event) -> None: ...


def named_peers(node: ServingNode, texts: Sequence[str]) -> list[PeerId]:
    """Return the members with these names or ends of ids; `invited` stands for those that the owner lists.
    Raises UsageError."""
    found: list[PeerId] = []
    for text in texts:
        if text == INVITED:
            found += node.provider.rules.peers
            if not node.provider.rules.peers:
                raise UsageError(
                    "--peers invited: this node lists no peers, or none that it knows",
                    "list them: peers = [...] under [offer] in node.toml; or give --peers NAME,NAME",
                )
            continue
        known = [
            peer
            for peer, member in node.state.members.items()
            if text and (member.name == text or peer_text(peer).endswith(text.removeprefix("...")))
        ]
        if len(known) != 1:
            told = f"{len(known)} members have that name" if known else "no member has that name"
            raise UsageError(f"--peers {text}: {told}", "look: `peerloom peers`")
        found += known
    return found


def peer_bounds(node: ServingNode, peer: PeerId) -> PeerBounds:
    """Return a peer's limits for services here. This node's own owner has no limits."""
    if peer == node.peer:
        return NO_BOUNDS
    rules = node.provider.rules
    return PeerBounds(rules.peer_sessions, rules.peer_tokens_per_minute, rules.peer_cache_percent / 100)


def make_serving(node: ServingNode) -> Serving:
    """Make the `Serving` object of a node, and count its stages among those that have a slot of this node."""
    runs = node.runs
    serving = Serving(
        node.seams,
        node.signer,
        ServingSwarm(
            discovery=node.discovery,
            live=runs.live,
            named=lambda peers: named_peers(node, peers),
            offers=runs.offers,
            round_trip_seconds=node.membership.round_trip_seconds,
            knowledge=lambda: runs.measurements.knowledge,
            learn=runs.measurements.learn,
            refuse=runs.refuse,
        ),
        ServingMachine(
            slots=runs.slots,
            machine=lambda: runs.machine,
            accepts=lambda service: node.provider.refusal(service, node.peer),
            bounds_of=lambda peer: peer_bounds(node, peer),
            expect_stage=runs.readiness.expect,
            publish=node.publish,
        ),
        models=runs.models,
        blobs=node.checkpoints.store.blobs,
        receipts=runs.receipts,
    )
    runs.occupancy.beside = serving.hosted
    return serving
