"""The codecs of a stage depend on its links, which may be unmeasured, fast or slow."""

import math
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing

from crypto.identity import PeerId
from node.pipeline.codec_choice import SAMPLE_BYTES, LinkCodecs
from node.pipeline.links import RATE_BYTES, Links
from node.seams import Network, RealClock
from partition.codecs.choice import narrowest
from partition.codecs.codec import CODECS, pack, typed
from sim.executor import SimExecutor

NEAR, FAR = PeerId(b"n" * 32), PeerId(b"f" * 32)
RATES: dict[PeerId, float | None] = {NEAR: 2e9, FAR: 12.5e6}


async def learnt(frames: Any, rates: dict[PeerId, float | None]) -> LinkCodecs:
    codecs = LinkCodecs(frames, rates.get, SimExecutor())
    values = np.random.default_rng(1).standard_normal((4, 256, 512)).astype("f4")
    for is_gradient in (False, True):
        await codecs.learn(pack([typed(values)], "raw"), is_gradient=is_gradient)
    return codecs


async def test_an_unmeasured_link_gets_the_smallest_frames_that_the_run_allows() -> None:
    codecs = await learnt("int8", {NEAR: 2e9, FAR: None})
    assert codecs.codec([NEAR, FAR], is_gradient=False) == "int8+zstd"
    unlearnt = LinkCodecs("bfloat16", RATES.get, SimExecutor())
    assert unlearnt.codec([NEAR], is_gradient=False) == "bfloat16+zstd"
    assert unlearnt.codec([], is_gradient=False) == "bfloat16+zstd"


async def test_a_fast_link_is_never_compressed() -> None:
    for frames in ("exact", "bfloat16", "int8", "int4"):
        codecs = await learnt(frames, RATES)
        assert codecs.codec([NEAR], is_gradient=False) == "raw"
        assert codecs.codec([NEAR], is_gradient=True) == "raw"


async def test_the_slowest_link_decides_within_the_allowed_codecs() -> None:
    assert (await learnt("int8", RATES)).codec([NEAR, FAR], is_gradient=False).startswith("int8")
    assert (await learnt("int4", RATES)).codec([FAR], is_gradient=True).startswith("int4")
    assert (await learnt("exact", RATES)).codec([FAR], is_gradient=True) in ("raw", "zstd")


async def test_short_frames_are_measured_together() -> None:
    codecs = LinkCodecs("exact", RATES.get, SimExecutor())
    values = np.random.default_rng(1).standard_normal((4, 4096)).astype("f4")
    chosen = []
    for _ in range(SAMPLE_BYTES // values.nbytes):
        chosen.append(codecs.codec([NEAR], is_gradient=False))
        await codecs.learn(pack([typed(values)], "zstd"), is_gradient=False)
    assert set(chosen) == {"zstd"}
    assert codecs.codec([NEAR], is_gradient=False) == "raw"


async def test_very_short_frames_are_compressed_only_if_loss_is_allowed() -> None:
    cases: tuple[tuple[Any, str], ...] = (("exact", "raw"), ("int8", "int8+zstd"))
    for frames, wanted in cases:
        codecs = LinkCodecs(frames, RATES.get, SimExecutor())
        assert codecs.codec([FAR], is_gradient=False) == narrowest(frames, is_gradient=False)
        await codecs.learn(pack([typed(np.zeros((4, 64), "f4"))], "raw"), is_gradient=False)
        assert codecs.codec([FAR], is_gradient=False) == wanted


async def test_every_codec_has_a_cost_in_the_simulator() -> None:
    assert set(await SimExecutor().calibrate(np.zeros(4, "f4"))) == set(CODECS)


class TimedNetwork:
    """A network whose links carry one megabyte a second."""

    has_better_path = False

    peer = NEAR

    async def open(self, peer: PeerId, protocol: str, *others: str) -> "TimedNetwork":
        return self

    async def send(self, message: bytes, *payload: memoryview) -> None:
        await trio.sleep((len(message) + sum(map(len, payload))) / 1e6)

    async def receive(self) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def aclose(self) -> None:
        return


def test_a_link_is_measured_once_it_carried_enough_bytes() -> None:
    async def main() -> None:
        async def deliver(peer: PeerId, data: bytes) -> None:
            raise AssertionError

        links = Links(
            cast("Network", TimedNetwork()),
            "/x/1",
            RealClock(),
            deliver=deliver,
            on_reconnected=lambda _: None,
            on_stuck=lambda _: None,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(links.run)
            assert links.rate(NEAR) == math.inf, "a node has a measured rate to itself"
            for _ in range(3 * RATE_BYTES // (1 << 20)):
                assert links.rate(FAR) is None or links.rate(FAR) == pytest.approx(1e6)
                links.send(FAR, bytes(1 << 20))
                await trio.sleep(2)
            assert links.rate(FAR) == pytest.approx(1e6, rel=1e-3)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
