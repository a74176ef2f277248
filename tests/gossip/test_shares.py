"""One source may fill only a share of a list. The source is the address of the packets, not a claimed
address."""

from crypto.contact import Address
from crypto.identity import PeerId
from gossip.member import Profile
from gossip.messages import AliveBody, AliveFact, announced, sign_body
from gossip.shares import SHARE_MIN, Shares
from gossip.table import MemberRow
from tests.gossip.swarm import HashSigner, peer_of

MOST = 200


def said(number: int, claimed: str) -> AliveFact:
    peer = peer_of(number)
    body = AliveBody(1, "x", (f"/ip4/{claimed}/tcp/9747",), b"")
    address = Address("ip4", claimed, 9747, peer)
    return announced(sign_body(HashSigner(peer), body), Profile("x", (address,)), body)


def rows(claimed: str) -> list[MemberRow]:
    return [MemberRow(said(number, claimed), 0.0, peer_of(number)) for number in range(MOST // 2)]


def test_a_claimed_address_does_not_use_up_another_networks_share() -> None:
    shares = Shares(MOST)
    shares.host_of = lambda _peer: "203.0.113.9"
    liars, newcomer = rows(claimed="198.51.100.7"), said(900, "198.51.100.7")
    shares.host_of = lambda peer: "198.51.100.7" if peer == peer_of(900) else "203.0.113.9"
    assert shares.allow(liars, len(liars), newcomer, newcomer.peer)
    assert not shares.allow(liars, len(liars), said(901, "192.0.2.1"), peer_of(901))


def test_members_with_unknown_hosts_share_one_part() -> None:
    shares = Shares(MOST)

    def unknown(_peer: PeerId) -> str | None:
        return None

    shares.host_of = unknown
    listed = [
        MemberRow(said(number, f"198.51.{number}.7"), 0.0, peer_of(number)) for number in range(MOST // 2)
    ]
    newcomer = said(900, "192.0.2.1")
    assert not shares.allow(listed, len(listed), newcomer, newcomer.peer)
    assert shares.allow(listed[: SHARE_MIN - 1] + rows("192.0.2.1")[:0], len(listed), newcomer, newcomer.peer)
    assert shares.allow(listed, len(listed), newcomer, peer_of(5))
