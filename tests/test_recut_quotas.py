"""Peers under CPU quotas in a live run: a peer with a reduced quota gives up exactly the layers that it
cannot carry.

Whole nodes in virtual time. Their processors behave like the kernel's under a quota: a stage computes at full
speed until its share of the period is spent, and then waits for the next period. So a peer that waits for a
slower one looks as fast as a whole processor.
"""

import pytest
import trio
from msgspec.structs import replace

from crypto.encoding import decode
from node.events import Event, RunPlanned, StepCommitted
from node.seams import Stage
from node.stages.process import SPECIFICATION_BYTES_MAX
from partition import stage as api
from partition.execute.admit import admit
from partition.plan.rates import REFERENCE, Calibration, KindPace, OperatorPace
from sim.executor import SimExecutor, SimStage
from sim.network import pace
from tests.stack import manifest, simulate, swarm, train
from tests.test_recut import deep_model, step_seconds

RATE = 2e6
"""FLOP/s of a whole processor: a layer takes some 30 ms forward, far less than a quota's period."""
PERIOD_SECONDS = 1.0
QUOTAS = {"a": 0.3, "b": 0.15, "c": 0.6}
THROTTLED = 0.2
"""The quota that the fastest peer has left after THROTTLED_AT steps."""
THROTTLED_AT = 6
STEPS = 30
KNOWN_SECONDS_MAX = 120.0
GAIN = 0.75
"""The next plan's step time may be at most this share of the previous. If a waiting peer were judged by its
present speed, the throttled peer would keep one layer more, and the share would be 0.87."""


class Processor:
    """A processor that computes only for `share` of each period."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._period, self._left = -1, 0.0

    def seconds(self, busy: float) -> float:
        """Return how long computing for `busy` seconds takes from now on, including waits."""
        begun = now = trio.current_time()
        while True:
            period = int(now / PERIOD_SECONDS)
            if period > self._period:
                self._period, self._left = period, self.share * PERIOD_SECONDS
            spent = min(busy, self._left, (period + 1) * PERIOD_SECONDS - now)
            self._left -= spent
            busy, now = busy - spent, now + spent
            if busy <= 1e-9:
                return now - begun
            now = (period + 1) * PERIOD_SECONDS + 1e-9


class QuotaExecutor(SimExecutor):
    """An executor whose passes take their operations' time on this processor; all other work takes no
    time."""

    def __init__(self, processor: Processor) -> None:
        super().__init__()
        self._processor = processor

    async def open_stage(self, specification: bytes) -> Stage:
        wanted: api.StageSpecification = decode(
            specification, api.StageSpecification, bytes_max=SPECIFICATION_BYTES_MAX
        )
        forward, is_last = admit(wanted).flops / 3 / RATE, wanted.graph.entries[0].loss is not None

        def seconds(request: api.Request) -> float:
            match request:
                case api.Forward():
                    return self._processor.seconds(forward * (3 if is_last and request.train else 1))
                case api.Backward():
                    return self._processor.seconds(2 * forward)
            return 0.0

        return SimStage(wanted, seconds, pace.PeerPace())


def calibration(share: float) -> Calibration:
    """Return the calibration of such a processor: matrix products at RATE, all other work free."""
    free = OperatorPace(0, 0, 0)
    product = replace(free, megaflop=round(1e18 / RATE))
    rows = KindPace("matmul", product, product), KindPace("elementwise", free, free)
    return replace(REFERENCE, kinds=rows, frame=free, step=free, share_permille=round(1000 * share))


def slowest_seconds(sizes: list[int], quotas: list[float]) -> float:
    """Return the time of the slowest stage, if a layer takes one second with a whole processor."""
    return max(size / quota for size, quota in zip(sizes, quotas, strict=True))


@pytest.mark.slow
def test_a_peer_under_a_tightened_quota_gives_layers_to_its_neighbours() -> None:
    processors = {name: Processor(share) for name, share in QUOTAS.items()}
    executors = {name: QuotaExecutor(processor) for name, processor in processors.items()}
    wanted = manifest(
        deep_model(),
        stages=3,
        replicas=1,
        steps=STEPS,
        microbatch=8,
        microbatches=16,
        test_samples=16,
        save_every=100,
        frames="exact",
    )
    found: list[Event] = []
    holders: list[str] = []

    async def scenario() -> None:
        async with swarm("abc", executors=executors, preset="lan") as group, trio.open_nursery() as nursery:
            for name, node in group.nodes.items():
                nursery.start_soon(node.measurements.run, calibration(QUOTAS[name]))
            peers = [node.peer for node in group.nodes.values()]
            with trio.fail_after(KNOWN_SECONDS_MAX):
                while len((await group.nodes["c"].measurements.learn(peers)).calibrations) < len(peers):  # noqa: ASYNC110
                    await trio.sleep(1)

            async def on_event(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == THROTTLED_AT:
                    processors["c"].share = THROTTLED

            _, events = await train(group, "c", wanted, on_event, seconds=3_600)
            found.extend(events)
            first = next(event for event in events if isinstance(event, RunPlanned))
            holders.extend(group.name_of(peer) for (peer,) in first.stages)
            nursery.cancel_scope.cancel()

    simulate(scenario)
    plans = [event for event in found if isinstance(event, RunPlanned)]
    assert len({plan.stages for plan in plans}) == 1  # only borders between neighbours move
    before, *_, after = ([last - first for first, last in plan.layers] for plan in plans)
    quotas = [{**QUOTAS, "c": THROTTLED}[name] for name in holders]
    fastest = holders.index("c")
    assert after[fastest] < before[fastest]
    assert slowest_seconds(after, quotas) <= GAIN * slowest_seconds(before, quotas)
    throttled = [row.seconds for row in found if isinstance(row, StepCommitted) and row.height == 0]
    assert step_seconds(found, plans[-1].height) <= GAIN * throttled[-1]
