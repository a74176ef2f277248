"""Members with false clocks hardly move the swarm's time, however many ids a liar invents."""

import pytest

from crypto.encoding import encode
from gossip.clocks import PLACE_WEIGHT_MAX
from gossip.messages import Ack, AliveBody, Gossip, Ping, sign_body
from gossip.settings import SwimSettings
from gossip.swim import Sends
from tests.gossip.swarm import HashSigner, Swarm, peer_of

TODAY = 1_800_000_000.0
YEAR = 31_557_600.0
LAN = SwimSettings.lan()
TELLER = 1
FIRST_LIAR = 1_000


class SwarmOfLiars(Swarm):
    """Let the `liars` answer each ping of a core immediately, with clocks that are wrong by `lie` seconds."""

    liars: range = range(0)
    lie = YEAR
    host: str | None = None

    def send(self, number: int, sends: Sends) -> None:
        super().send(number, sends)
        for peer, sent in sends:
            liar = next((each for each in self.liars if peer_of(each) == peer), None)
            if liar is not None and isinstance(sent, Ping):
                wall = int((self.now + TODAY + self.lie) * 1000)
                self._push(self.now + 0.001, number, (peer, encode(Ack(sent.number, (), None, wall)), False))

    def introduce(self, count: int, observer: int = 0) -> None:
        """Let a member introduce liars to `observer`, all in one burst."""
        self.liars = range(FIRST_LIAR, FIRST_LIAR + count)
        core = self.cores[observer]
        for liar in self.liars:
            address = f"/ip4/10.9.{liar // 250}.{liar % 250}/tcp/9747"
            fact = sign_body(HashSigner(peer_of(liar)), AliveBody(1, f"n{liar}", (address,), b""))
            self.send(observer, core.receive(self.now, peer_of(TELLER), Gossip((fact,))))

    def error(self, number: int = 0) -> float | None:
        """Return the error of the swarm's time at this core, whose own clock is right."""
        core = self.cores[number]
        found = core.clocks.swarm(self.now, TODAY, core.live - 1)
        return None if found is None else found - TODAY


def honest(count: int) -> SwarmOfLiars:
    swarm = SwarmOfLiars(count, LAN, seed=3)
    for core in swarm.cores.values():
        core.wall_offset = TODAY
    swarm.run(2 * count)
    return swarm


@pytest.mark.parametrize("lie", [YEAR, -0.5 * YEAR])
def test_a_burst_of_invented_members_does_not_move_the_clock(lie: float) -> None:
    swarm = honest(40)
    swarm.lie = lie
    assert swarm.error() == pytest.approx(0.0, abs=0.01)
    swarm.introduce(30)
    for _ in range(20):
        swarm.run(5)
        assert swarm.error() == pytest.approx(0.0, abs=0.01)
    assert swarm.cores[0].live == 70, "not all liars are listed and were asked for the time"
    assert max(swarm.cores[0].clocks.peers(swarm.now)) - TODAY == pytest.approx(max(lie, 0.0), abs=0.01)


def test_a_majority_on_one_host_does_not_move_the_clock() -> None:
    swarm = honest(PLACE_WEIGHT_MAX + 4)
    hosts = {peer_of(number): f"198.51.100.{number + 1}" for number in swarm.cores}
    swarm.cores[0].locate(lambda peer: hosts.get(peer, "203.0.113.9"))
    swarm.run(60)
    swarm.introduce(30)
    swarm.run(100)
    assert swarm.cores[0].live > 30
    assert swarm.error() == pytest.approx(0.0, abs=0.01)
