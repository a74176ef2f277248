"""`node.Node`: a node inside a user's program. Its arguments are also those of the blocking form,
`node.sync`.

async with node.Node(join=["10.0.0.5:9747"], name="lab-1", data_dir="DIR") as me: ...
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import TypedDict, Unpack

from node import runtime
from node.config import Config, resolve
from node.errors import UsageError
from node.events import Event
from node.paths import is_default_data_dir
from node.recording.recorder import open_record
from node.seams import Clock, Executor, Network, Parts, Storage
from node.services.capacity import Capacity
from node.storage.folder_lock import find_holder

SCRIPTS_MAX = 64
"""Maximum number of script nodes that one user runs simultaneously on a machine, each with its own
identity."""


class NodeParts(TypedDict, total=False):
    """Replacements for a node's real parts: see `node.runtime.Node`."""

    network: Network
    clock: Clock
    rng: Random
    entropy: Callable[[int], bytes]
    executor: Executor
    storage: Storage
    capacity: Capacity
    observe: Callable[[object], None]
    parts: Parts


class Node(runtime.Node):
    """A node of a swarm inside a program that uses trio, entered by `async with`. Its arguments are those of
    `node.sync`; `parts` are for simulations."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        join: Sequence[str] | str = (),
        name: str | None = None,
        data_dir: Path | str | None = None,
        swarm: str | None = None,
        preset: str | None = None,
        listen: Sequence[str] = (),
        lan: bool | None = None,
        report: Callable[[Event], None] | None = None,
        record: Path | str | None = None,
        **parts: Unpack[NodeParts],
    ) -> None:
        """Make the node without starting it. Raises UsageError."""
        configs = configs_of(
            config,
            join=join,
            name=name,
            data_dir=data_dir,
            swarm=swarm,
            preset=preset,
            listen=listen,
            lan=lan,
        )
        chosen = next((each for each in configs if find_holder(each.data_dir) is None), configs[-1])
        self._record = None if record is None else open_record(Path(record), "record")
        join = () if config is None else join
        super().__init__(chosen, join=join, report=report, recorder=self._record, **parts)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            return await super().__aexit__(kind, error, trace)
        finally:
            if self._record is not None:
                self._record.close()


def configs_of(
    config: Config | None,
    *,
    join: Sequence[str] | str,
    name: str | None,
    data_dir: Path | str | None,
    swarm: str | None,
    preset: str | None,
    listen: Sequence[str],
    lan: bool | None,
) -> tuple[Config, ...]:
    """Return the possible configurations of a node. The node takes the first whose data folder is free.

    Without `config`, the environment and the arguments override the defaults. With `config`, only `join` may
    be given, and it adds to the config's addresses. Raises UsageError.
    """
    given: dict[str, str | bool | Sequence[str] | None] = {
        "name": name,
        "data_dir": None if data_dir is None else str(data_dir),
        "swarm": swarm,
        "preset": preset,
        "listen": list(listen) or None,
        "lan": lan,
    }
    if config is not None:
        for key, value in given.items():
            if value is not None:
                raise UsageError(f"{key}= has no effect together with config=", f"replace(config, {key}=...)")
        return (config,)
    found = resolve(given | {"join": [join] if isinstance(join, str) else list(join)}, os.environ)
    if not is_default_data_dir(found.data_dir, os.environ):
        return (found,)
    scripts = found.data_dir.parent / "scripts"
    return tuple(replace(found, data_dir=scripts / str(number + 1)) for number in range(SCRIPTS_MAX))
