"""Stores a run's chain of plans on disk: this node's promises, and the history of the plans for newcomers.

The chain itself belongs to the run's member (`partition.run.member`), which sends nothing that depends on a
promise before the promise is stored.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import trio
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.protocols.manifest import Run
from node.runs.context import RunService
from node.seams import Storage, own_rng
from partition.plan.change import CHANGE_BYTES_MAX, Change, encode_change
from partition.plan.history import CHANGES_MAX, HISTORY_BYTES_MAX, SEGMENTS_MAX, History, extend
from partition.plan.paxos import PaxosChain
from partition.plan.paxos_messages import LINKS_BYTES_MAX, Link
from partition.plan.plan import Hash, Height, Plan

ENTERED_BYTES_MAX = 2 * HISTORY_BYTES_MAX + LINKS_BYTES_MAX + 64 * 1024
"""Maximum size of the stored entry: a history, and the later changes, of which many may arrive at once."""


def chain_name(run: str) -> str:
    """Return the storage name of this node's promises in a run."""
    return f"runs/{run}/chain"


def history_name(run: str) -> str:
    """Return the storage name of the history with which this node entered a run, and of later changes."""
    return f"runs/{run}/history"


class RunEntry(msgspec.Struct, frozen=True, array_like=True):
    """How a node entered a run: the history that admitted it, the height and hash of that history's last
    plan, and the changes since."""

    history: History
    height: Height
    plan: Hash
    links: tuple[Link, ...] = ()


def read_entered(storage: Storage, run: str) -> RunEntry:
    """Read the stored entry of a run. Raises RemoteProtocolError if it is missing or damaged."""
    data = storage.read(history_name(run)) or b""
    entered: RunEntry = decode(data, RunEntry, bytes_max=ENTERED_BYTES_MAX)
    return entered


class ChainShell:
    """Stores one run's chain. `entered` is the history with which this node entered the run, with the
    decisions it has learnt since. `stored` is called whenever the promises have been stored."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        plan: Plan,
        *,
        entered: RunEntry,
        durable: bytes = b"",
        may_fork: bool,
        tie_breaker: PeerId | None = None,
        stored: Callable[[], None],
    ) -> None:
        seams, me = service.seams, service.signer.peer
        self.core: PaxosChain = seams.core(
            seams.part(PaxosChain),
            me,
            plan,
            own_rng(seams.rng),
            durable=durable,
            may_fork=may_fork,
            tie_breaker=tie_breaker,
        )
        self._signer = service.signer
        self._run = run.text
        self._entered = entered
        self._seams = seams
        self._stored = stored
        self._wanted = trio.Event()

    @property
    def head(self) -> Plan:
        """The newest plan that is known to be decided."""
        return self.core.head

    def history(self, plan: Plan, change: Change | None = None) -> History:
        """Return the history of `plan` for a newcomer. `plan` is either decided, or would result from
        `change`.

        Raises RemoteProtocolError if the run has had too many changes to send.
        """
        self._note_links()
        entered = self._entered
        if plan.height == 0:
            return entered.history
        count = plan.height - entered.height - (change is not None)
        if not 0 <= count <= len(entered.links):
            raise RemoteProtocolError("the run has had more changes than a newcomer can be sent")
        links = [*entered.links[:count], *([] if change is None else [encode_change(change)])]
        return extend(self._signer, entered.history, entered.plan, links)

    @property
    def can_tell(self) -> bool:
        """Whether a newcomer could be sent the next plan's history, which is limited in size and number of
        changes."""
        self._note_links()
        entered, head = self._entered, self.core.head
        size = entered.history.size_bytes + sum(map(len, entered.links)) + CHANGE_BYTES_MAX
        return (
            head.height < min(CHANGES_MAX, entered.height + len(entered.links) + 1)
            and size < HISTORY_BYTES_MAX
            and len(entered.history.segments) < SEGMENTS_MAX
        )

    def _note_links(self) -> bool:
        """Add the decisions that the core has learnt to the entry; return whether any were added."""
        entered, chain = self._entered, self.core.chain
        missing = self.core.head.height - entered.height - len(entered.links)
        is_full = len(entered.links) > CHANGES_MAX or sum(map(len, entered.links)) > HISTORY_BYTES_MAX
        if is_full or not 0 < missing <= len(chain):
            return False
        self._entered = replace(entered, links=(*entered.links, *chain[-missing:]))
        return True

    def store(self) -> None:
        """Request that the promises be stored."""
        self._wanted.set()

    async def run(self) -> None:
        """Store promises on request, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            await self._save()
            self._stored()

    async def _save(self) -> None:
        await self._seams.executor.run(
            partial(self._seams.storage.write, chain_name(self._run), self.core.durable)
        )
        if self._note_links():
            data = encode(self._entered)
            await self._seams.executor.run(partial(self._seams.storage.write, history_name(self._run), data))
