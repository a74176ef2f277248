"""The archive of ended runs, kept across restarts: one small file per run.

A run counts as ended if it has ended on this node or its result is stored here. It never begins again, and
nothing replaces its result. Only for `node.runs.runs`.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated

import msgspec
import trio
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.checkpoints.weights import digest_of
from node.protocols.manifest import Run, run_text
from node.protocols.notices import NUMBER_MAX
from node.protocols.runs import End, Stop
from node.result_events import RESULTS_SHOWN_MAX, RunRemembered
from node.runs.progress import ShownSteps
from node.seams import Seams, Storage
from partition.plan.plan import Hash, Peer
from partition.run.messages import REASON_LENGTH_MAX

RUNS_FOLDER = "runs"
OWN_MAX = 1_024
"""Maximum number of this node's own ended runs that are remembered."""
OTHERS_MAX = 256
"""Maximum number of other peers' ended runs that are remembered. They are counted separately, because unknown
peers can end any number of runs."""
_RECORD_BYTES_MAX = 4_096
_FILE = "ended"
_RESULT = "model.safetensors"

Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]


class EndedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run. `weights` is the BLAKE3 hash (hex) of its result, and `loss` that of its last step.
    `stop` is the requester's signed stop, if that ended the run. `for_all`: the run has ended on every other
    member too. `others` are the members that reported a different result
    (`node.result_events.ResultDiffers`)."""

    run: Hash
    requester: Peer
    model: str
    data: str
    steps: Number
    outcome: str
    detail: str
    weights: str
    ended_milliseconds: Number
    step: Number = 0
    loss: float | None = None
    accuracy: float | None = None
    stop: Fact | None = None
    for_all: bool = False
    others: Annotated[tuple[tuple[Peer, str], ...], msgspec.Meta(max_length=RESULTS_SHOWN_MAX)] = ()

    @property
    def text(self) -> str:
        """The run's short id."""
        return run_text(self.run)


def ended_name(run: str) -> str:
    """Return the storage name of a run's end."""
    return f"{RUNS_FOLDER}/{run}/{_FILE}"


class Archive:
    """The archive in the data folder of the node `me`.

    `load` and `save` access the disk and run in the executor's threads, one at a time. All other methods work
    in memory once `load` has returned.
    """

    def __init__(self, storage: Storage, me: bytes) -> None:
        self._storage = storage
        self._me = me
        self._records: dict[str, EndedRun] = {}
        self._results: set[str] = set()
        self._unsaved: set[str] = set()
        self._others: dict[str, tuple[tuple[Peer, str], ...]] = {}
        """Results that other members reported for runs whose end is not recorded yet."""

    @property
    def records(self) -> tuple[EndedRun, ...]:
        """All remembered ends, the oldest first."""
        return tuple(sorted(self._records.values(), key=lambda record: record.ended_milliseconds))

    def is_over(self, run: bytes) -> bool:
        """Return whether a run has ended on this node, or its result is stored here."""
        text = run_text(run)
        return text in self._records or text in self._results

    def has_result(self, run: str) -> bool:
        """Return whether the result of the run with this short id is stored here."""
        return run in self._results

    def result(self, run: bytes) -> str:
        """Return the hash (hex) of the stored result; empty if there is none or its hash is not known."""
        text = run_text(run)
        record = self._records.get(text)
        return record.weights if record is not None and text in self._results else ""

    def told(self, run: bytes, plan: bytes) -> End | Stop | None:
        """Return the message that tells a returning member, which still follows `plan`, how the run ended for
        all; None if it may continue elsewhere."""
        record = self._records.get(run_text(run))
        if record is None or record.run != run:
            return None
        if record.stop is not None:
            return Stop(record.stop)
        if result := self.result(run):
            return End(plan, "done", record.detail, result)
        if record.for_all and record.outcome == "failed":
            return End(plan, "failed", record.detail, "")
        return None

    def load(self) -> None:
        """Read the records from the disk."""
        for run, file in self._files():
            if file == _RESULT:
                self._results.add(run)
            elif file == _FILE:
                self._read(run)

    def _files(self) -> Iterator[tuple[str, str]]:
        for name in self._storage.sizes(RUNS_FOLDER):
            run, _, file = name.removeprefix(f"{RUNS_FOLDER}/").partition("/")
            yield run, file

    def _read(self, run: str) -> None:
        data = self._storage.read(ended_name(run))
        try:
            record: EndedRun = decode(data or b"", EndedRun, bytes_max=_RECORD_BYTES_MAX)
        except RemoteProtocolError:
            self._storage.delete(ended_name(run))  # damaged, or written by a different version
            return
        self._records[run] = record

    def evict(self, run: str) -> None:
        """Record that the result of the run with this short id was evicted; the run's end is still known."""
        self._results.discard(run)

    def add(self, record: EndedRun, *, is_here: bool = False, keeps: bool = True) -> None:
        """Add the end of a run and whether its result `is_here`, and forget the oldest above the limit. With
        `keeps`, the next `save` stores it."""
        self._records[record.text] = replace(record, others=self._others.pop(record.text, record.others))
        if keeps:
            self._unsaved.add(record.text)
        if is_here:
            self._results.add(record.text)
        for is_own, limit in ((True, OWN_MAX), (False, OTHERS_MAX)):
            kind = [each for each in self.records if (each.requester == self._me) == is_own]
            for old in kind[: max(0, len(kind) - limit)]:
                del self._records[old.text]
                self._unsaved.add(old.text)

    def differ(self, run: str, peer: PeerId, weights: str) -> bool:
        """Add another member's different result of a run; return whether to show it."""
        record = self._records.get(run)
        known = self._others.get(run, ()) if record is None else record.others
        if len(known) >= RESULTS_SHOWN_MAX or peer in dict(known):
            return False
        others = (*known, (peer, weights))
        if record is not None:
            self._records[run] = replace(record, others=others)
            self._unsaved.add(run)
            return True
        self._others.pop(run, None)
        self._others[run] = others
        # runs that were forgotten before this node learnt their end
        for old in list(self._others)[:-OTHERS_MAX]:
            del self._others[old]
        return True

    def save(self) -> None:
        """Store the added records. Raises OSError."""
        for run in list(self._unsaved):
            record = self._records.get(run)
            if record is None:
                self._storage.delete(ended_name(run))
            else:
                self._storage.write(ended_name(run), encode(record))
            self._unsaved.discard(run)


class ArchiveShell:
    """The node's archive for the runs service."""

    def __init__(self, seams: Seams, me: PeerId) -> None:
        self._seams = seams
        self._archive = Archive(seams.storage, me)
        self._saving = trio.Lock()

    async def load(self) -> None:
        """Read the records from the disk; before that, nothing is known."""
        await self._seams.executor.run(self._archive.load)

    @property
    def records(self) -> tuple[EndedRun, ...]:
        """See `Archive.records`."""
        return self._archive.records

    def remembered(self) -> Iterator[RunRemembered]:
        """Yield the events of runs that ended before this node was started."""
        for record in self._archive.records:
            yield RunRemembered(
                at=self._seams.clock.wall(),
                run=record.text,
                model=record.model,
                data=record.data,
                requester=PeerId(record.requester),
                steps=record.steps,
                step=record.step,
                loss=record.loss,
                accuracy=record.accuracy,
                outcome=record.outcome,
                detail=record.detail,
                weights=record.weights,
                is_here=self.has_result(record.text),
                ended_at=record.ended_milliseconds / 1000,
                others=tuple((PeerId(peer), weights) for peer, weights in record.others),
            )

    def is_over(self, run: bytes) -> bool:
        """See `Archive.is_over`."""
        return self._archive.is_over(run)

    def has_result(self, run: str) -> bool:
        """See `Archive.has_result`."""
        return self._archive.has_result(run)

    def evict(self, run: str) -> None:
        """See `Archive.evict`."""
        self._archive.evict(run)

    def result(self, run: bytes) -> str:
        """See `Archive.result`."""
        return self._archive.result(run)

    def told(self, run: bytes, plan: bytes) -> End | Stop | None:
        """See `Archive.told`."""
        return self._archive.told(run, plan)

    async def note(
        self,
        run: Run,
        shown: ShownSteps,
        outcome: str,
        detail: str,
        weights: str,
        *,
        is_here: bool,
        stop: Fact | None = None,
        for_all: bool = False,
        keeps: bool = True,
    ) -> None:
        """Record that a run has ended on this node, and whether its result `is_here`. If not `keeps`, or if
        the disk is full, it is only known until the next start."""
        committed, evaluated = shown.committed, shown.evaluated
        manifest = run.manifest
        await self._add(
            EndedRun(
                run=run.id,
                requester=run.requester,
                model=manifest.model,
                data=manifest.data,
                steps=manifest.steps,
                outcome=outcome,
                detail=detail[:REASON_LENGTH_MAX],
                weights=weights,
                ended_milliseconds=int(self._seams.clock.wall() * 1000),
                step=0 if committed is None else committed.step + 1,
                loss=None if committed is None else committed.loss,
                accuracy=None if evaluated is None else evaluated.accuracy,
                stop=stop,
                for_all=for_all,
            ),
            is_here=is_here,
            keeps=keeps,
        )

    async def differ(self, run: str, peer: PeerId, weights: str) -> bool:
        """Add a different result of a run (see `Archive.differ`), even if the run's end is not recorded
        yet."""
        is_shown = self._archive.differ(run, peer, weights)
        if is_shown:
            await self._save()
        return is_shown

    async def close(self, run: Run) -> None:
        """Record the end of a run that this node could not record before it was stopped."""
        if self.has_result(run.text) and not self.result(run.id):
            digest = await self._seams.executor.run(partial(digest_of, self._seams.storage, run.text))
            await self.note(run, ShownSteps(), "done", "", digest, is_here=True)

    async def _add(self, record: EndedRun, *, is_here: bool, keeps: bool) -> None:
        self._archive.add(record, is_here=is_here, keeps=keeps)
        await self._save()

    async def _save(self) -> None:
        async with self._saving:
            with suppress(OSError):
                await self._seams.executor.run(self._archive.save)
