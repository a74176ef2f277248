"""A node's DHT state across restarts: the sqlite file, damage to it, and other storages."""

from contextlib import closing
from pathlib import Path

import pytest

from crypto.identity import PeerId
from dht.keys import record_key
from dht.records import Record, check_record, sign_record
from node.seams import Storage
from node.storage.folder import FolderStorage
from node.storage.records_file import CONTACTS_MAX, NAME, Contact, RecordsFile
from sim.storage import MemoryStorage
from tests.dht.swarm import signer

WALL = 1_700_000_000.0
HERE = signer(0)


def made(author: int, name: bytes = b"k", value: bytes = b"v", *, seconds: float = 60) -> Record:
    key = record_key("test", name)
    fact = sign_record(signer(author), key, value, sequence=1, expires=int(WALL + seconds))
    return check_record(HERE, fact)


def loaded(storage: Storage) -> tuple[list[Record], list[Contact]]:
    """Return the records that a new file object reads from the file."""
    with closing(RecordsFile(storage)) as file:
        return file.load(HERE, WALL)


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return FolderStorage(tmp_path / "data") if request.param == "folder" else MemoryStorage()


def test_records_and_contacts_come_back_after_a_restart(storage: Storage) -> None:
    file = RecordsFile(storage)
    records = [made(number) for number in range(3)]
    contacts = [(signer(number).peer, (f"10.0.0.{number}:9",)) for number in range(5)]
    file.save({(each.key, each.publisher): each for each in records}, contacts)
    file.save({(records[0].key, records[0].publisher): None})
    file.close()
    again, known = loaded(storage)
    assert {each.publisher for each in again} == {each.publisher for each in records[1:]}
    assert known == contacts


def test_expired_records_are_not_restored(storage: Storage) -> None:
    file = RecordsFile(storage)
    file.save({(each.key, each.publisher): each for each in (made(1, seconds=10), made(2, seconds=1_000))})
    assert [each.publisher for each in file.load(HERE, WALL + 500)[0]] == [signer(2).peer]
    file.close()


def test_a_record_changed_on_the_disk_is_discarded(storage: Storage) -> None:
    file = RecordsFile(storage)
    file.save({(made(1).key, made(1).publisher): made(1), (made(2).key, made(2).publisher): made(2)})
    file._database.execute("UPDATE record SET signature = ? WHERE publisher = ?", (bytes(64), signer(1).peer))
    file._database.execute("INSERT INTO contact VALUES (?, ?, 0)", (b"short", b"\x90"))
    file._database.commit()
    records, contacts = file.load(HERE, WALL)
    file.close()
    assert ([each.publisher for each in records], contacts) == ([signer(2).peer], [])


def test_a_damaged_file_counts_as_empty(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    (tmp_path / NAME).write_bytes(b"this is no database" * 100)
    file = RecordsFile(storage)
    assert file.load(HERE, WALL) == ([], [])
    file.save({(made(1).key, made(1).publisher): made(1)})
    file.close()
    assert len(loaded(storage)[0]) == 1
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0


def test_the_number_of_stored_contacts_is_limited() -> None:
    file = RecordsFile(MemoryStorage())
    peers = [PeerId(number.to_bytes(32, "big")) for number in range(CONTACTS_MAX + 9)]
    file.save({}, [(peer, ()) for peer in peers])
    assert len(file.load(HERE, WALL)[1]) == CONTACTS_MAX
    file.close()
