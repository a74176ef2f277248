"""A node's DHT records and contacts, kept across restarts in one sqlite file.

In a data folder the file is updated in place; other storage gets the whole database as one blob. The content
still comes from unknown peers, so signatures are checked again, and a damaged file counts as empty. One
thread at a time uses it, never the event loop's.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PEER_ID_BYTES, PeerId
from dht.keys import Key
from dht.messages import AddressTexts
from dht.records import Record, check_record
from node.forks import leave_to_parent
from node.seams import Storage
from node.storage.folder import FolderStorage
from node.storage.ownership import FILE_MODE

NAME = "records.sqlite"
VERSION = 1
CONTACTS_MAX = 1_024
"""Maximum number of contacts kept, those that answered most recently. The table of a million nodes has about
400."""
RECORDS_MAX = 20_000
"""Maximum number of records read back: twice what a node holds, or 30 MB."""
TEXTS_BYTES_MAX = 512

_TABLES = """
CREATE TABLE IF NOT EXISTS record (
    key BLOB NOT NULL, publisher BLOB NOT NULL, body BLOB NOT NULL, signature BLOB NOT NULL,
    expires INTEGER NOT NULL, PRIMARY KEY (key, publisher)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contact (
    peer BLOB PRIMARY KEY, addresses BLOB NOT NULL, place INTEGER NOT NULL
) WITHOUT ROWID;
"""

Contact = tuple[PeerId, tuple[str, ...]]


class RecordsFile:
    """The records file of one node. Every method may raise OSError or sqlite3.Error if the disk fails."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._path = storage.path / NAME if isinstance(storage, FolderStorage) else None
        self._database = self._open()
        leave_to_parent(self)

    def load(self, signer: Signer, wall: float) -> tuple[list[Record], list[Contact]]:
        """Return the live records with valid signatures, and the contacts, those that answered most recently
        first."""
        rows = self._database.execute(
            "SELECT publisher, body, signature FROM record WHERE expires > ? LIMIT ?",
            (int(wall), RECORDS_MAX),
        )
        records = []
        for row in rows:
            try:
                records.append(check_record(signer, Fact(*map(bytes, row))))
            except (RemoteProtocolError, TypeError):
                continue
        rows = self._database.execute(
            "SELECT peer, addresses FROM contact ORDER BY place LIMIT ?", (CONTACTS_MAX,)
        )
        contacts: list[Contact] = []
        for peer, addresses in rows:
            with contextlib.suppress(RemoteProtocolError, TypeError):
                texts: AddressTexts = decode(bytes(addresses), AddressTexts, bytes_max=TEXTS_BYTES_MAX)
                if len(peer) == PEER_ID_BYTES:
                    contacts.append((PeerId(bytes(peer)), texts))
        return records, contacts

    def save(
        self, changes: Mapping[tuple[Key, PeerId], Record | None], contacts: Iterable[Contact] | None = None
    ) -> None:
        """Store records, or delete those that are None. `contacts` replace all earlier ones."""
        gone = [place for place, record in changes.items() if record is None]
        kept = [
            (record.key, record.publisher, record.fact.body, record.fact.signature, record.expires)
            for record in changes.values()
            if record is not None
        ]
        with self._database:
            self._database.executemany("DELETE FROM record WHERE key = ? AND publisher = ?", gone)
            self._database.executemany("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?)", kept)
            if contacts is not None:
                rows = [
                    (peer, encode(texts), place)
                    for place, (peer, texts) in enumerate(list(contacts)[:CONTACTS_MAX])
                ]
                self._database.execute("DELETE FROM contact")
                self._database.executemany("INSERT OR REPLACE INTO contact VALUES (?, ?, ?)", rows)
        if self._path is None:
            self._storage.write(NAME, self._database.serialize())

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _open(self) -> sqlite3.Connection:
        with contextlib.suppress(sqlite3.DatabaseError):
            return self._connect()
        # Damaged, or written by a later version. Other nodes hold the records too, so this must not prevent
        # the start.
        if self._path is not None:
            for path in _files(self._path):
                path.unlink(missing_ok=True)
        else:
            self._storage.delete(NAME)
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        if self._path is not None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            os.close(descriptor)
        database = sqlite3.connect(self._path or ":memory:", check_same_thread=False)
        try:
            data = self._storage.read(NAME) if self._path is None else None
            if data:
                database.deserialize(data)
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"version {version}")
            if self._path is not None:
                # Consistent after a crash of the process; a crash of the machine may lose the last seconds.
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_TABLES)
            database.execute(f"PRAGMA user_version = {VERSION}")
            database.execute("SELECT count(*) FROM record").fetchone()
        except BaseException:
            database.close()
            raise
        return database


def _files(path: Path) -> Sequence[Path]:
    """Return the file and the additional files that sqlite creates."""
    return path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")
