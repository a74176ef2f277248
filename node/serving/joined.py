"""The service of services as a node has it: joined to its runs, whose slots and models it shares."""

from typing import Any, Protocol

from crypto.identity import PeerId
from node.events import Event
from node.placement.provider import Provider
from node.runs.runs import Runs
from node.seams import Seams
from node.services.discovery import Discovery
from node.services.membership import Membership
from node.serving.serving import Serving


class Parts(Protocol):
    """What is needed of `node.runtime.Node`."""

    peer: PeerId
    seams: Seams
    signer: Any
    discovery: Discovery
    membership: Membership
    provider: Provider
    runs: Runs

    def publish(self, event: Event) -> None: ...


def make_serving(node: Parts) -> Serving:
    """Make it, and count its stages among those that have a slot of this node."""
    runs = node.runs
    serving = Serving(
        node.seams,
        node.signer,
        models=runs.models,
        discovery=node.discovery,
        slots=runs.slots,
        machine=lambda: runs.machine,
        offers=runs.offers,
        accepts=lambda service: node.provider.refusal(service, node.peer),
        live=runs.live,
        round_trip_seconds=node.membership.round_trip_seconds,
        publish=node.publish,
        refuse=runs.refuse,
    )
    runs.hosted_beside = serving.hosted
    return serving
