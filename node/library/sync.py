"""`node.sync`: a node for plain scripts and notebooks, whose event loop runs in a thread of its own.

with node.sync(join=["10.0.0.5:9747"]) as me:
    print(me.id, me.addresses, me.members())

me = node.sync().open() # in a notebook, where a `with` cannot span cells; call me.close() at the end
"""

import atexit
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from node.config import Config
from node.errors import UsageError
from node.events import Event
from node.library.blocking import BlockingSurface
from node.library.embedding import SCRIPTS_MAX, configs_of
from node.paths import short_path
from node.portal import Portal
from node.recording.recorder import Recorder, open_record
from node.runtime import Node
from node.storage.folder_lock import find_holder

if TYPE_CHECKING:
    from node.optimizer.open import Module, Optimizer, PeerOptimizer

log = logging.getLogger("peerloom")


class SyncNode(BlockingSurface):
    """A node in blocking form: see `sync`. Its methods may be called from any thread, even concurrently."""

    def __init__(
        self, configs: Iterable[Config], make: Callable[[Config], Node], recorder: Recorder | None = None
    ) -> None:
        """`configs` are tried in order, and the first whose data folder is free is taken. `recorder` is
        closed with the node."""
        self._recorder = recorder
        self._configs = tuple(configs)
        self._make = make
        self._is_closed = False

    def open(self) -> Self:
        """Start the node; return it. Raises UsageError, like `peerloom`."""
        portal, node = self._open()
        super().__init__(portal, node)
        atexit.register(self.close)
        return self

    def _open(self) -> tuple[Portal[Node], Node]:
        last = len(self._configs) - 1
        for number, config in enumerate(self._configs):
            if number < last and find_holder(config.data_dir) is not None:
                continue
            portal: Portal[Node] = Portal(lambda config=config: self._make(config))  # type: ignore[misc]  # bound now
            try:
                node = portal.open()
            except UsageError:
                # Try the next one: a different script may have locked the folder after it was found free.
                if number == last or find_holder(config.data_dir) is None:
                    raise
                continue
            if number:
                self._tell_of_another_identity(number)
            return portal, node
        raise UsageError(
            f"{SCRIPTS_MAX} scripts of this user are already running nodes",
            "choose a folder for this one with data_dir=",
        )

    def _tell_of_another_identity(self, number: int) -> None:
        """Log which folder is used instead of the first, and why, for users who expect the identity in the
        first folder."""
        first = self._configs[0].data_dir
        log.warning(
            (
                "process %s holds %s; this node takes %s, which has a different identity "
                "(data_dir= chooses a folder)"
            ),
            find_holder(first) or "with an unknown number",
            short_path(first),
            short_path(self._configs[number].data_dir),
        )

    def optimizer(
        self,
        optimizer: "Optimizer | Sequence[Optimizer]",
        run_id: str,
        *,
        target_batch_size: int | None = None,
        local_steps: int | None = None,
        model: "Module | None" = None,
        join_seconds: float = 2.0,
        **options: Any,
    ) -> "PeerOptimizer":
        """Return a torch optimizer that trains together with all peers that use the same `run_id`.

        It wraps one optimizer, or several of one model. Give exactly one of `target_batch_size` (samples,
        over all peers) and `local_steps` (between two averaging rounds). If `model` is given, local steps
        also average its floating-point buffers, and tensors have the model's names. `options` are those of
        `node.optimizer.wrapper.Settings`. If the run has already begun, its state is fetched before this
        returns; it waits `join_seconds` for peers. Raises UsageError, TypeError, ValueError.
        """
        # Import it here, so that a node that trains nothing itself never imports torch.
        from node.optimizer.open import open_optimizer

        return open_optimizer(
            self._portal,
            optimizer,
            model,
            join_seconds,
            run_id=run_id,
            target_batch_size=target_batch_size,
            local_steps=local_steps,
            **options,
        )

    def close(self) -> None:
        """Leave the swarm and end the node. May be called repeatedly. In a forked child it does nothing."""
        if not self._is_closed and hasattr(self, "_portal"):
            self._is_closed = True
            atexit.unregister(self.close)
            self._portal.close()
            if self._recorder is not None and self._portal.is_here:
                self._recorder.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def sync(
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
) -> SyncNode:
    """Return a node in blocking form, to be entered by `with` or `open()`.

    Its arguments are those of `node.Node`. Without `config`, the environment (`PEERLOOM_*`) and these
    arguments override the defaults, each argument like the `peerloom` flag with its name. With `config`,
    `join` adds to it, and other arguments are refused. Without a data folder, the node takes the first of the
    folders `scripts/1`, `scripts/2`, ... next to the default folder that no other script holds. So several
    scripts can run on one machine, and a restarted script keeps its identity. A script that does not get the
    first folder logs that.

    A forked child of the script, such as a worker of a DataLoader, cannot use the node: its calls raise
    `node.forks.ForkedChild`. `report` is called with every event, in the node's thread. `record` is a file to
    write, as with `peerloom --record` (docs/recording.md). Raises UsageError.
    """
    configs = configs_of(
        config, join=join, name=name, data_dir=data_dir, swarm=swarm, preset=preset, listen=listen, lan=lan
    )
    join = () if config is None else join
    recorder = None if record is None else open_record(Path(record), "record")
    made = partial(Node, join=join, report=report, recorder=recorder)
    return SyncNode(configs, made, recorder)
