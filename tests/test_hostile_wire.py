"""The hostile member sends every kind of message that the program reads: no protocol is omitted.

The test searches the program for names of protocols and decoded types, so a new one that is not in
`tests.hostile.wire` makes it fail. Most generated values of each kind must pass the decoder.
"""

import ast
import importlib
import re
from random import Random
from types import ModuleType
from typing import Any

import pytest

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner
from crypto.identity import Identity
from tests.hostile.known import Known
from tests.hostile.values import Values
from tests.hostile.wire import PROTOCOLS, everything, structs
from tests.source import Source, sources

PROTOCOL_NAME = re.compile(r"/peerloom/[a-z]+/[0-9]+")
BY_CALLERS = {
    ("node.services.driver", "self._message_type"): "the datagrams of membership and records",
    ("node.protocols.checkpoint", "kind"): "a checkpoint or a list of chunks",
    ("node.protocols.calls", "kind"): "the answer to a call: see `decoded`",
    ("node.protocols.manifest", "_Beginning"): "the beginning of a manifest",
}
"""Decoders whose callers pass the type; both types are in the registry."""
ELSEWHERE = {
    "partition.model.graph": "a graph: tests.partition.hostile",
    "partition.plan.chain": "this node's own disk",
    "node.checkpoints.store": "this node's own disk",
    "node.runs.best": "this node's own disk",
    "node.storage.blobs": "this node's own disk",
    "node.placement.slots": "this node's own disk",
    "node.averaging.proofs_file": "this node's own disk",
    "node.runs.receipts_file": "this node's own disk",
    "node.runs.archive": "this node's own disk",
    "node.storage.guests": "this node's own disk",
    "node.runs.chain": "this node's own disk",
    "node.content.graphs": "this node's own disk",
    "node.calibration.own_work": "messages between this process and a child of its own",
    "node.local.column": "answers of a stage, in payloads: tests.partition.hostile_stage",
    "node.local.stage_server": "requests to a stage, in payloads: tests.partition.hostile_stage",
    "node.content.data_cache": "this node's own disk",
    "node.content.text_files": "lists and files of a text, in blobs: tests.data.test_fenced_text",
    "node.content.dataset_store": "a data set's manifest: tests.node.test_shards",
    "node.local.saved": "a run in local mode, from this node's own disk: tests.node.local.test_restart",
    "node.averaging.invitations": "a person's text, and this node's disk: tests.node.optimizer.test_admit",
    "node.stages.host": "answers of a stage's process: tests.partition.hostile_stage",
    "node.stages.process": "requests to a stage's process, by its own node",
    "node.transport.router": "hellos: tests.hostile.guests",
    "node.following": "a hint by a broadcast, and this node's own disk: tests.node.test_following",
    "node.transport.beacon": "beacons: tests.hostile.packets",
}
SAMPLES = 100
LET_IN_MIN = 0.6
"""Minimum share of generated values of a kind that pass its decoder."""


DECODERS = (("crypto.encoding", "decode", 1), ("node.protocols.calls", "call", 4))
"""Functions that decode, and the position of the argument that is the type."""


def decoded(source: Source) -> list[ast.expr]:
    """Return the types that a file decodes, from all its calls of `DECODERS`."""
    found = []
    for module, function, place in DECODERS:
        imports_it = any(
            node.module == module and function in [alias.name for alias in node.names]
            for node in source.each(ast.ImportFrom)
        )
        if imports_it or source.module == module:
            found += [
                node.args[place]
                for node in source.each(ast.Call)
                if isinstance(node.func, ast.Name) and node.func.id == function
            ]
    return found


def named(module: ModuleType, name: ast.expr) -> Any:
    """Return the object of an expression such as `wire.Request` in a module."""
    found: Any = module
    for part in ast.unparse(name).split("."):
        found = getattr(found, part)
    return found


def test_every_protocol_is_attacked() -> None:
    found = {
        match
        for source in sources("crypto", "dht", "gossip", "partition", "node")
        for node in source.each(ast.Assign)
        if isinstance(node.value, ast.Constant)
        for match in PROTOCOL_NAME.findall(str(node.value.value))
    }
    assert found == {name for each in PROTOCOLS for name in (each.name, each.former) if name}


def test_every_decoded_type_is_sent() -> None:
    missing = []
    for source in sources("crypto", "dht", "gossip", "partition", "node"):
        for kind in decoded(source):
            if source.module in ELSEWHERE or (source.module, ast.unparse(kind)) in BY_CALLERS:
                continue
            for each in structs(named(importlib.import_module(source.module), kind)):
                if each not in everything() | {Fact}:
                    missing.append(f"{source.place}:{kind.lineno} {each.__name__}")
    assert missing == []


def test_types_decoded_outside_the_registry_are_still_decoded() -> None:
    reading = {
        source.module for source in sources("crypto", "dht", "gossip", "partition", "node") if decoded(source)
    }
    assert set(ELSEWHERE) | {module for module, _ in BY_CALLERS} <= reading


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_most_generated_values_of_a_kind_pass_its_decoder(protocol: Any) -> None:
    values = Values(Random(1), Known(), IdentitySigner(Identity(bytes(32)), "home"))
    for union in (protocol.said, protocol.answered, protocol.datagrams):
        for kind in structs(union):
            let_in = 0
            for _ in range(SAMPLES):
                try:
                    message: Any = decode(values.message(kind, protocol.name), union, bytes_max=1 << 30)
                except RemoteProtocolError:
                    continue
                assert isinstance(message, kind)
                let_in += 1
            assert let_in >= LET_IN_MIN * SAMPLES, kind.__name__


def test_the_same_seed_gives_the_same_messages() -> None:
    def said() -> list[bytes]:
        values = Values(Random(7), Known(), IdentitySigner(Identity(bytes(32)), "home"))
        return [values.message(kind, PROTOCOLS[3].name) for kind in structs(PROTOCOLS[3].said)]

    assert said() == said()
