"""Results, graphs and data of other peers' runs share one budget with the checkpoints of those runs. The
oldest is evicted first.
"""

from pathlib import Path

import pytest

from node.storage.blobs import Blobs, NoRoom
from node.storage.folder import FolderStorage
from node.storage.guests import GUESTS_MAX, Guests
from sim.storage import MemoryStorage


class Disk:
    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.start()

    def start(self) -> None:
        self.blobs = Blobs(self.storage, guest_bytes_max=100)
        self.guests = Guests(self.storage, self.blobs)

    def put(self, label: str, size: int) -> None:
        self.guests.admit(label, [label], size)
        self.storage.write(label, bytes(size))


def test_the_oldest_guest_is_evicted_for_the_newest_even_after_a_restart() -> None:
    disk = Disk()
    for label in ("first", "second"):
        disk.put(label, 40)
    disk.start()
    disk.put("third", 40)
    assert disk.guests.labels == ("second", "third")
    assert disk.storage.read("first") is None
    assert list(disk.guests.evicted) == ["first"]
    assert disk.guests.bytes_here == 80


def test_guests_in_use_stay_and_a_failed_admission_evicts_nothing() -> None:
    disk = Disk()
    for label in ("first", "second"):
        disk.put(label, 40)
    disk.guests.needed = frozenset(["first"])
    with pytest.raises(NoRoom):
        disk.put("large", 61)
    assert disk.guests.labels == ("first", "second")
    disk.put("third", 60)
    assert disk.guests.labels == ("first", "third")


def test_pinned_blobs_evict_files_but_no_file_evicts_pinned_blobs() -> None:
    disk = Disk()
    disk.put("file", 60)
    name = disk.blobs.put(bytes(50))
    disk.blobs.pin("state", {name: 50}, is_guest=True)
    assert "file" not in disk.guests.labels
    with pytest.raises(NoRoom):
        disk.put("another", 51)
    disk.put("another", 50)
    with pytest.raises(NoRoom):
        disk.blobs.pin("larger", {bytes(32): 101}, is_guest=True)
    assert disk.guests.labels == ("another",)


def test_the_nodes_own_files_do_not_count_as_guests() -> None:
    disk = Disk()
    disk.put("ours", 90)
    disk.guests.release("ours")
    disk.put("theirs", 90)
    assert disk.storage.read("ours") == bytes(90)


def test_the_number_of_guests_is_limited_even_for_tiny_ones() -> None:
    disk = Disk()
    for number in range(GUESTS_MAX + 1):
        disk.put(str(number), 0)
    assert len(disk.guests.labels) == GUESTS_MAX
    assert disk.guests.labels[0] == "1"


def test_a_draft_stays_invisible_until_it_is_committed(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "data")
    storage.write("folder/name", b"before")
    drafts = [storage.draft("folder/name") for _ in range(2)]
    for draft, data in zip(drafts, (b"one", b"other"), strict=True):
        draft.write(data)
    assert storage.read("folder/name") == b"before"
    assert list(storage.sizes("folder")) == ["folder/name"]
    drafts[0].commit()
    for draft in drafts:
        draft.discard()
    assert storage.read("folder/name") == b"one"
    assert [path.name for path in (tmp_path / "data" / "folder").iterdir()] == ["name"]
    assert (tmp_path / "data" / "folder" / "name").stat().st_mode & 0o777 == 0o600
