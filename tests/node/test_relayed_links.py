"""The measured rate of a relayed link never exceeds the relay's limit. The link is measured again when its
path changes."""

from collections import Counter
from random import Random

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.seams import Network, RealClock
from node.services.links import LinkMeasuring, measure_link
from node.services.relays.ledger import BURST_SECONDS, Limits
from tests.node.nets import until
from tests.node.test_relays import ask, behind_a_relay

UPLOAD = 1_250_000


def refuse(_peer: PeerId, error: RemoteProtocolError) -> None:
    raise error


def measuring(network: Network) -> LinkMeasuring:
    return LinkMeasuring(
        network,
        RealClock(),
        Random(1),
        is_busy=lambda: False,
        round_trip_seconds=lambda _peer: None,
        refuse=refuse,
        counters=Counter(),
    )


async def test_a_relayed_link_is_no_faster_than_its_relay_allows() -> None:
    async with behind_a_relay(Limits(is_on=True, bytes_per_second=UPLOAD)) as by:
        measuring(by.hidden)
        await until(lambda: bool(by.hidden.circuits))
        await ask(by.guest, by.hidden.peer)
        rates = await measure_link(by.guest, RealClock(), by.hidden.peer)
        assert max(rates) <= 1.25 * UPLOAD * (1 + BURST_SECONDS)


async def test_a_link_whose_path_changes_is_measured_again() -> None:
    async with behind_a_relay() as by:
        service = measuring(by.guest)
        measuring(by.hidden)
        await until(lambda: bool(by.hidden.circuits))
        hidden = by.hidden.peer
        await ask(by.guest, hidden)
        while service.core.next(service.core.deadline, [hidden]) != hidden:
            pass
        assert await service._probe(hidden)
        service._look_at_ways(service.core.deadline)
        assert service.core.sent_rate(hidden) > 0, "the measurement was dropped although the path is the same"
        await by.hidden.multiplexed.offer(by.guest.peer, by.guest.addresses[0])
        service._look_at_ways(service.core.deadline)
        assert service.core.sent_rate(hidden) == 0
