"""The hostile peer's own process: a member of the swarm that sends hostile messages without end, and requests
runs of its own."""

import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import trio

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner
from crypto.identity import PeerId
from node.content.graphs import graph_name
from node.errors import StreamClosed, Unreachable
from node.events import RunEnded
from node.placement.leases import PlacementFailed
from node.protocols import runs as wire
from node.protocols.manifest import Manifest, check_run, make_run
from node.runtime import Node
from node.seams import RealClock
from node.storage.folder import FolderStorage
from node.storage.keys import keys_of
from node.transport.network import RealNetwork
from partition.plan.plan import decode_plan
from tests.hostile.client import NICENESS
from tests.hostile.insider import Insider, lying
from tests.hostile.known import Known
from tests.hostile.own_run import learn_run, take_in
from tests.hostile.values import Values
from tests.hostile.watched import HOST, SWARM, capacity, settings, word

NAME = "m"
OWN_RUN_SECONDS_MAX = 30.0
PAUSE_SECONDS = 5.0
"""Seconds between two of the peer's own runs. Each placed run starts a process that loads torch, which takes
seconds of a core."""


def be_insider(
    connection: Connection, folder: Path, join: str, seed: int, wanted: bytes, graph: bytes
) -> None:
    """Run the process. It sends its peer id once it is a member. After that it answers `("speak", victims,
    idle)`, `("hear", messages, runs)` and `sent` immediately."""
    os.nice(NICENESS)  # in reality it would be a different machine
    folder.mkdir()
    with suppress(KeyboardInterrupt):
        trio.run(_be_insider, connection, folder, join, seed, wanted, graph)


async def _be_insider(
    connection: Connection, folder: Path, join: str, seed: int, wanted: bytes, graph: bytes
) -> None:
    storage = FolderStorage(folder)
    keys = keys_of(storage, os.urandom)
    signer = IdentitySigner(keys.identity, SWARM)
    values = Values(Random(seed), Known(), signer)
    network = RealNetwork(
        keys.identity, keys.static, SWARM, clock=RealClock(), entropy=os.urandom, listen=[(HOST, 0)]
    )
    node = Node(
        settings(NAME, folder, accept_runs="never"),
        join=[join],
        network=lying(network, values),
        storage=storage,
        capacity=capacity(),
        observe=lambda event: values.known.learn(event) if isinstance(event, msgspec.Struct) else None,
    )
    insider = Insider(network, values)
    async with node, trio.open_nursery() as nursery:
        storage.write(graph_name(msgspec.msgpack.decode(wanted, type=Manifest).graph_hash), graph)
        connection.send(node.peer)
        while (said := await trio.to_thread.run_sync(word, connection, abandon_on_cancel=True)) is not None:
            match said:
                case ("speak", victims, idle):
                    nursery.start_soon(_speak, insider, victims)
                    own = msgspec.msgpack.decode(wanted, type=Manifest)
                    nursery.start_soon(_have_runs, node, insider, values, idle, own)
                    connection.send("ready")
                case ("hear", messages, runs):
                    _hear(values.known, signer, messages, runs)
                    connection.send("heard")
                case "sent":
                    connection.send(dict(insider.sent))
        nursery.cancel_scope.cancel()


async def _speak(insider: Insider, victims: Sequence[PeerId]) -> None:
    while True:
        await insider.round(victims)


async def _have_runs(node: Node, insider: Insider, values: Values, idle: PeerId, wanted: Manifest) -> None:
    """Place runs one after another, so that others find slots too: first with raw messages, then as an honest
    requester while the same peer sends everything else."""
    number = 0
    while True:
        with suppress(StreamClosed, Unreachable):
            await take_in(insider, values, node.signer, idle)
        await trio.sleep(PAUSE_SECONDS)
        number += 1
        await _train(node, msgspec.structs.replace(wanted, seed=number, stages=1, replicas=1))
        await trio.sleep(PAUSE_SECONDS)


async def _train(node: Node, wanted: Manifest) -> None:
    run = make_run(node.signer, wanted)
    with node.watch() as events, trio.move_on_after(OWN_RUN_SECONDS_MAX), suppress(PlacementFailed):
        await node.runs.submit(run)
        async for event in events:
            if isinstance(event, RunEnded):
                break
    for member in list(node.runs.members.values()):
        await member.end("failed", "enough", "")


def _hear(known: Known, signer: IdentitySigner, messages: Sequence[bytes], runs: Sequence[Any]) -> None:
    for data in messages:
        with suppress(RemoteProtocolError):
            known.learn(decode(data, wire.PipelineMessage, bytes_max=len(data)))
    for fact, plan in runs:
        learn_run(
            known,
            check_run(signer, decode(fact, Fact, bytes_max=len(fact))),
            decode_plan(plan) if plan else None,
        )
