"""A node's list of its services fits one message, however many services it holds."""

from crypto.encoding import encode
from crypto.facts import Fact
from crypto.identity import Identity
from node.protocols.services import (
    MANIFEST_BYTES_MAX,
    REPLY_BYTES_MAX,
    SERVICES_MAX,
    Listing,
    ServiceRow,
    make_found,
)
from partition.serve.messages import ROLL_ROWS_MAX

PEERS = [Identity(number.to_bytes(32)).peer for number in range(1, ROLL_ROWS_MAX + 1)]


def listing(service: int, stage: int) -> Listing:
    """Return a stage of a service with as many members as possible; the first member is the node that is
    asked."""
    fact = Fact(bytes(36), bytes([service]) * MANIFEST_BYTES_MAX, bytes(64))
    rows = (ServiceRow(PEERS[0], stage, True), *(ServiceRow(peer, 1, True, False) for peer in PEERS[1:]))
    return Listing(fact, rows, 1 << 20, 1 << 50, 1 << 50, bytes(16), 1 << 36, 1 << 36)


def test_many_stages_of_one_service_fit_one_answer() -> None:
    found = make_found(listing(1, stage) for stage in range(SERVICES_MAX))
    assert len(encode(found)) <= REPLY_BYTES_MAX
    assert [each.rows[0] for each in found.listings] == [
        ServiceRow(PEERS[0], n, True) for n in range(SERVICES_MAX)
    ]
    assert found.listings[0].rows == listing(1, 0).rows


def test_many_services_fit_one_answer_that_names_further_holders() -> None:
    found = make_found(listing(service, 0) for service in range(SERVICES_MAX))
    assert len(encode(found)) <= REPLY_BYTES_MAX
    assert len(found.listings) == SERVICES_MAX
    assert all(len(each.rows) >= ROLL_ROWS_MAX // 4 for each in found.listings)


def test_many_stages_of_one_service_do_not_hide_another_service() -> None:
    stages = [listing(1, stage) for stage in range(SERVICES_MAX)]
    found = make_found([*stages, listing(2, 0)])
    assert [each.manifest.body[0] for each in found.listings] == [1, 2] + [1] * (SERVICES_MAX - 2)
