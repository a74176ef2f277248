"""A requester learns from members' own reports why they have no slot."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from crypto.contact import parse_address
from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from gossip.member import Status, SwarmMember
from node import config
from node.placement.leases import LACKS, Offer, PlacementFailed, lacks_text, make_plan
from node.placement.offers import offers_of, own_offer
from node.placement.permission import RESTING
from node.protocols.manifest import make_run
from node.protocols.runs import RUNS_WORD
from node.runtime import Node
from node.services.capacity import Capacity
from node.services.metadata import (
    FENCED,
    OBSERVER,
    STAGES,
    UNREACHABLE_WORD,
    AdvertisedStanding,
    encode_metadata,
)
from tests.source import ROOT
from tests.stack import Model, manifest, prepare, simple_cnn

CAPACITY = Capacity("cpu", 2, 2**33, 2**34, 1e9, "")
ME = PeerId(bytes(32))
USUAL = (RUNS_WORD, STAGES, FENCED)


def offer_of(words: tuple[str, ...] | None, *, accepts_runs: bool = False, rate: float = 1e9) -> Offer:
    standing = None if words is None else AdvertisedStanding(words)
    capacity = Capacity("cpu", 2, 2**33, 2**34, rate, "")
    metadata = encode_metadata(capacity, accepts_runs=accepts_runs, standing=standing)
    peer = PeerId(b"x" * 32)
    member = SwarmMember(peer, "x", (), metadata, Status.ALIVE, 1, 0.0, "", None, None)
    (found,) = (
        each for each in offers_of(own_offer(ME, CAPACITY, has_slot=True), [member]) if each.peer == peer
    )
    return found


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        ((RUNS_WORD,), "never"),
        ((RUNS_WORD, FENCED, OBSERVER), "observer"),
        ((RUNS_WORD, STAGES), "unfenced"),
        ((*USUAL, UNREACHABLE_WORD), "unreachable"),
        *(((*USUAL, word), word) for word in RESTING),
        ((STAGES, FENCED), "version"),
        (USUAL, "not said"),
        (None, "not said"),
    ],
)
def test_each_reason_that_a_member_reports_is_read(words: tuple[str, ...] | None, lacks: str) -> None:
    offer = offer_of(words)
    assert (offer.has_slot, offer.lacks) == (False, lacks)
    assert lacks_text([offer]) == f"members without a slot: 1 {LACKS[lacks]}"


def test_a_member_that_accepts_stages_reports_no_reason() -> None:
    assert offer_of(USUAL, accepts_runs=True) == offer_of(None, accepts_runs=True)
    assert offer_of(USUAL, accepts_runs=True).lacks == ""
    assert offer_of(USUAL, accepts_runs=True, rate=0.0).lacks == "device"
    assert lacks_text([offer_of(USUAL, accepts_runs=True)]) == ""


def test_a_plan_that_lacks_memory_does_not_mention_slots() -> None:
    model = simple_cnn()
    run = make_run(IdentitySigner(Identity(bytes(32)), "test"), manifest(model, stages=1, replicas=1))
    small = Offer(ME, 1e9, 1, has_slot=True)
    with pytest.raises(PlacementFailed) as caught:
        make_plan(run, model.graph, [small, offer_of((RUNS_WORD, STAGES))])
    assert "without a slot" not in caught.value.reason


@pytest.fixture
def captured() -> Model:
    """Load torch before the time limit of the test begins."""
    return simple_cnn()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[str]]:
    """Yield the addresses of two real nodes: one on a kernel without Landlock, and an observer."""
    common = [sys.executable, "-m", "node", "--json", "--listen", "127.0.0.1:0", "--no-lan", "--web", "off"]
    common += ["--preset", "local"]
    without_landlock = [sys.executable, "-m", "tests.node.without_landlock"]
    commands = [
        [*without_landlock, *common, "--data-dir", str(tmp_path / "a")],
        [*common, "--observer", "--data-dir", str(tmp_path / "b")],
    ]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            for command in commands
        ]
        for process in processes:
            stack.callback(process.kill)
        yield [_address(process) for process in processes]


def _address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["kind"] == "FencesTried" and not event["fences"]:
            pytest.skip(f"this kernel: {event['unfenced']}")
        if event["kind"] == "NodeStarted":
            return str(event["addresses"][0])
    pytest.skip("the filter that stands for another kernel cannot be set here")


async def test_a_run_that_no_member_serves_ends_with_their_reasons(
    tmp_path: Path, captured: Model, members: list[str]
) -> None:
    settings = config.Config(
        data_dir=tmp_path / "requester",
        swarm=config.SwarmSettings(preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False, seeds=tuple(parse_address(address) for address in members)),
        resources=config.Resources(calibrate=False, accept_runs="never"),
    )
    async with Node(settings) as node:
        with node.watch() as events:
            while len(node.membership.live) < 1 + len(members):
                await events.receive()
            with pytest.raises(PlacementFailed) as caught:
                await node.runs.submit(prepare(node, manifest(captured, stages=1, replicas=1)))
    lacking = f"1 {LACKS['observer']}, 1 {LACKS['unfenced']}"
    assert f"0 offer a slot; members without a slot: {lacking}" in caught.value.reason
