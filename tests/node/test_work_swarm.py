"""`[swarm] work_bits` as a user sets it: real nodes, each with its node.toml, one of them without work."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import trio

import node
from crypto.contact import parse_address
from crypto.identity import Identity, PeerId
from dht.work import has_work, work_of
from node.config import resolve
from node.errors import JoinTimeout, Unreachable
from node.library.sync import SyncNode
from tests.node.nets import PING, make_network, running, until

BITS = 6
"""Number of bits that can be mined within milliseconds."""
SETTLED_SECONDS = 0.6
"""Time for several probes and syncs of the preset `local`, after which every valid member is listed."""

Start = Callable[..., SyncNode]


def seed_with(is_right: Callable[[PeerId], bool]) -> bytes:
    """Return the first seed whose peer id fits."""
    seeds = (number.to_bytes(32, "big") for number in count(1))
    return next(seed for seed in seeds if is_right(Identity(seed).peer))


def without_work() -> bytes:
    return seed_with(lambda peer: work_of(peer) == 0)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def make(name: str, bits: int, *join: str, seed: bytes = b"") -> SyncNode:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        file = folder / "node.toml"
        file.write_text(
            f'name = "{name}"\ndata_dir = "data"\n[swarm]\nname = "work"\npreset = "local"\n'
            f"work_bits = {bits}\n[join]\nlan = false\nseeds = {list(join)}\n"
            '[listen]\naddresses = ["127.0.0.1:0"]\n[resources]\ncalibrate = false\n'
        )
        if seed:
            (folder / "data").mkdir(mode=0o700)
            key = folder / "data" / "identity.key"
            key.touch(mode=0o600)
            key.write_bytes(seed)
        return node.sync(resolve({"config": str(file)}, {}))

    return make


def names(me: SyncNode) -> list[str]:
    return sorted(member.name for member in me.members())


def test_an_id_without_work_is_listed_nowhere_and_gets_the_reason(start: Start) -> None:
    with start("a", BITS) as a, start("b", BITS, a.addresses[0]) as b:
        b.wait_for_members(1)
        with start("c", 0, a.addresses[0], seed=without_work()) as c:
            (refused,) = c.join([b.addresses[0]])
            assert refused.outcome == "work"
            assert refused.detail == (
                f"this swarm requires ids with {BITS} bits of work, but this node's id has 0: "
                f"start with --work-bits {BITS} and a new identity"
            )
            (turned_away,) = a.join([c.addresses[0]])
            assert turned_away.outcome == "work"
            assert f"work_bits is 0 there but {BITS} here" in turned_away.detail
            with pytest.raises(JoinTimeout):
                a.wait_for_members(2, timeout_seconds=SETTLED_SECONDS)
            assert (names(a), names(b), names(c)) == (["b"], ["a"], [])


async def test_different_settings_are_reported_for_every_id() -> None:
    able = Identity(seed_with(lambda peer: has_work(peer, BITS)))
    members = make_network("a", work_bits=BITS)
    other = make_network("d", identity=able, work_bits=BITS - 1)
    async with running(members, other):
        with pytest.raises(Unreachable) as refusal:
            await other.identify(members.addresses[0].of(None))
    assert (refusal.value.reason, refusal.value.detail) == (
        "work",
        f"this swarm has work_bits {BITS}, but this node has {BITS - 1}: start with --work-bits {BITS}",
    )


async def test_a_false_claim_of_work_gets_no_stream_and_no_datagram() -> None:
    honest = make_network(
        "a", identity=Identity(seed_with(lambda peer: has_work(peer, BITS))), work_bits=BITS
    )
    liar = make_network("c", identity=Identity(without_work()), work_bits=BITS)
    inbox = honest.inbox(PING)
    async with running(honest, liar):
        with pytest.raises(Unreachable) as refusal:
            await liar.identify(honest.addresses[0])
        assert refusal.value.reason == "work"
        with pytest.raises(Unreachable) as refusal:
            await honest.identify(parse_address(liar.addresses[0].short))
        assert refusal.value.reason == "work"
        liar.learn(honest.peer, honest.addresses)
        liar.send(honest.peer, PING, b"let me in")
        await until(lambda: honest.counters["datagrams_refused_work"] > 0)
        assert await inbox.take(trio.current_time()) == []
