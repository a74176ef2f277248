"""A client that sends wrong arguments gets an error about them, and the error does not show the node's
code."""

from typing import Any

import pytest

from node.checkpoint_commands import CheckpointCommands
from node.commands import Commands
from node.errors import UsageError
from node.serving_commands import ServingCommands
from tests.stack import simulate, swarm

RUN = "ab" * 8
WRONG: dict[tuple[str, str], list[Any]] = {
    ("runs.trace", "steps"): [[1], {"a": 1}, "4", True, 10**400, float("inf"), float("nan")],
    ("train", "wait_seconds"): [[1], "10m", float("nan")],
    ("dht.put", "ttl_seconds"): [{}, [], "1h", float("inf")],
    ("dht.put", "value"): ["no hex", [1]],
    ("dht.find", "memory_bytes"): ["8GB", [8]],
    ("dht.find", "count"): [[1], float("nan")],
    ("runs.fetch", "out"): [None, 1, "", "a\0b"],
    ("checkpoint.export", "out"): [None, [], "a\0b"],
    ("checkpoint.fetch", "from"): [1, [1], {"a": 1}],
    ("serve", "model"): [None, "", "a\0b"],
    ("serve", "wish"): [[], {"stages": "2"}],
    ("generate", "service"): [None, 1, ""],
    ("generate", "question"): ["text", {"tokens_max": "many"}],
    ("events", "kinds"): [1, [1], "RunEnded"],
}

GIVEN = {"serve": {"model": "m"}, "generate": {"service": "s"}}
"""The other arguments of a command, all of them valid."""


async def ignore(value: object) -> None:
    """Discard a progress report."""


def test_a_wrong_argument_of_a_command_is_a_usage_error() -> None:
    async def scenario() -> None:
        async with swarm("a", preset="lan") as group:
            node = group.nodes["a"]
            made = CheckpointCommands(node, node.checkpoints, node.runs.copies, node.runs.save)
            handlers = {**Commands(node).handlers, **made.handlers, **ServingCommands(node.serving).handlers}
            for (command, name), values in WRONG.items():
                for value in values:
                    given = GIVEN.get(command, {} if command == "train" else {"run": RUN})
                    with pytest.raises(UsageError, match=name):
                        await handlers[command]({**given, "follow": False, name: value}, ignore)

    simulate(scenario)
