"""Whatever a client sends to a command, it hears of its mistake, and never of the node's code."""

from typing import Any

import pytest

from node.checkpoint_commands import CheckpointCommands
from node.commands import Commands
from node.errors import UsageError
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
    ("events", "kinds"): [1, [1], "RunEnded"],
}


async def ignore(value: object) -> None:
    """Take progress that nobody looks at."""


def test_a_wrong_argument_of_a_command_is_a_mistake_in_use() -> None:
    async def scenario() -> None:
        async with swarm("a", preset="lan") as group:
            node = group.nodes["a"]
            made = CheckpointCommands(node, node.checkpoints, node.runs.copies, node.runs.save)
            handlers = {**Commands(node).handlers, **made.handlers}
            for (command, name), values in WRONG.items():
                for value in values:
                    run = {} if command == "train" else {"run": RUN}
                    with pytest.raises(UsageError, match=name):
                        await handlers[command]({**run, "follow": False, name: value}, ignore)

    simulate(scenario)
