"""A run in local mode on this node's disk: its record, and this member's latest state.

Each run has one record and one state, and a newer one replaces the older. So a run takes as much space as its
model's parameters and moments (twice that while the newer state is written). A member that comes back
continues from its state if no other member is ahead, so a run survives a stop of all its members. Stored data
is checked like received data: the tickets again, and each chunk of a state by its hash.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PEER_ID_BYTES
from node.averaging.snapshot import CHUNK_BYTES, Snapshot, SnapshotTable, check_table
from node.protocols.manifest import Run, check_run
from node.seams import Storage
from partition.plan.plan import STAGES_MAX
from partition.run.tickets import REVOKED_MAX, Chain, Revocations, TicketStanding, check_chain

FOLDER = "runs"
RUN_FILE, STATE_FILE = "local", "local.state"
RUN_BYTES_MAX = 98_304
"""Maximum size of a record: a full chain of tickets, a manifest, the names of members, and the maximum number
of revocations."""
TABLE_BYTES_MAX = 16 << 20
MEMBERS_MAX = 64
"""Maximum number of members remembered. A member that comes back announces itself to them."""
LENGTH_BYTES = 8

Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]


class SavedRun(msgspec.Struct, frozen=True, array_like=True):
    """The record with which this node can be a member again after a restart."""

    manifest: Fact
    chain: Chain
    is_training: bool
    members: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=MEMBERS_MAX)]
    stage: Annotated[int, msgspec.Meta(ge=0, lt=STAGES_MAX)] = 0
    revoked: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=REVOKED_MAX)] = ()


def run_name(run: str) -> str:
    """Return the storage name of a run."""
    return f"{FOLDER}/{run}/{RUN_FILE}"


def state_name(run: str, copy_of: int | None = None) -> str:
    """Return the storage name of a run's latest state or, with `copy_of`, of the copy of that stage of
    another member."""
    return f"{FOLDER}/{run}/{STATE_FILE}" + ("" if copy_of is None else f".{copy_of}")


def save_run(storage: Storage, run: Run, saved: SavedRun) -> None:
    """Store a run's record. Raises OSError."""
    storage.write(run_name(run.text), encode(saved))


def save_state(storage: Storage, run: str, snapshot: Snapshot, copy_of: int | None = None) -> None:
    """Replace the stored state. Raises OSError, and then the previous state remains."""
    table = encode(snapshot.table)
    draft = storage.draft(state_name(run, copy_of))
    try:
        draft.write(len(table).to_bytes(LENGTH_BYTES, "big") + table)
        for number in range(len(snapshot.table.chunks)):
            draft.write(snapshot.chunk(number))
        draft.commit()
    finally:
        draft.discard()


def state_bytes(snapshot: Snapshot) -> int:
    """Return the size of a state in bytes."""
    return LENGTH_BYTES + len(encode(snapshot.table)) + snapshot.table.size_bytes


def load_state(storage: Storage, run: str, bytes_max: int, copy_of: int | None = None) -> Snapshot | None:
    """Return the latest state of a run; None if there is none, or it is damaged."""
    name = state_name(run, copy_of)
    head = storage.read_part(name, 0, LENGTH_BYTES)
    if head is None or len(head) != LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    if length > TABLE_BYTES_MAX:
        return None
    try:
        table: SnapshotTable = decode(
            storage.read_part(name, LENGTH_BYTES, length) or b"", SnapshotTable, bytes_max=TABLE_BYTES_MAX
        )
        check_table(table, bytes_max)
    except RemoteProtocolError:
        return None
    data = np.empty(table.size_bytes, np.uint8)
    for number, expected in enumerate(table.chunks):
        room = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        part = storage.read_part(name, LENGTH_BYTES + length + number * CHUNK_BYTES, room.size)
        if part is None or len(part) != room.size or blake3(part).digest() != expected:
            return None
        room[:] = np.frombuffer(part, np.uint8)
    return Snapshot(table, data)


def forget(storage: Storage, run: str) -> None:
    """Delete a run's record, its state, and its copies of other members' stages."""
    copies = [name for name in storage.sizes(f"{FOLDER}/{run}") if name.startswith(state_name(run) + ".")]
    for name in (run_name(run), state_name(run), *copies):
        storage.delete(name)


def saved_runs(storage: Storage, signer: Signer, wall: float) -> Iterator[tuple[Run, SavedRun]]:
    """Yield the runs that this node was a member of when it was stopped. Damaged ones are deleted, and so are
    those whose tickets have expired by `wall` seconds."""
    for name in sorted(storage.sizes(FOLDER)):
        text, _, file = name.removeprefix(f"{FOLDER}/").partition("/")
        if file != RUN_FILE:
            continue
        try:
            saved: SavedRun = decode(storage.read(name) or b"", SavedRun, bytes_max=RUN_BYTES_MAX)
            run = check_run(signer, saved.manifest)
            if saved.chain or run.requester != signer.peer:
                tickets = check_chain(signer, run.id, run.requester, saved.chain, signer.peer)
                if TicketStanding(tuple(tickets)).until <= wall:
                    raise RemoteProtocolError("its tickets have expired")
            Revocations(signer, run.id, run.requester).learn(saved.revoked)
            if run.manifest.local is None or run.text != text:
                raise RemoteProtocolError("another run")
        except RemoteProtocolError:
            forget(storage, text)
            continue
        yield run, saved
