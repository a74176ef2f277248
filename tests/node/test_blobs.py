"""Blobs stored by their hash: damage is detected, pinned blobs stay, unreferenced blobs are removed, and
guests (blobs of other peers' runs) stay within their budget.
"""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from crypto.errors import LocalProtocolError
from node.seams import Storage
from node.storage.blobs import BLOB_BYTES_MAX, Blobs, NoRoom, hash_of
from node.storage.folder import FolderStorage
from sim.storage import MemoryStorage

Make = Callable[[], Storage]


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return FolderStorage(tmp_path / "data") if request.param == "folder" else MemoryStorage()


def file_of(name: bytes) -> str:
    return f"blobs/{name.hex()[:2]}/{name.hex()}"


def sizes(*blobs: bytes) -> dict[bytes, int]:
    return {hash_of(data): len(data) for data in blobs}


def test_a_blob_is_found_by_its_hash_and_survives_a_restart(storage: Storage) -> None:
    blobs = Blobs(storage)
    name = blobs.put(b"one")
    assert name == hash_of(b"one") == blobs.put(memoryview(b"one"))
    assert (blobs.get(name), blobs.has(name), blobs.get(bytes(32))) == (b"one", True, None)
    again = Blobs(storage)
    assert (again.get(name), again.bytes_here) == (b"one", 3)
    assert again.missing([bytes(32), name, bytes(32)]) == [bytes(32)]
    again.delete(name)
    again.delete(name)
    assert (again.get(name), Blobs(storage).has(name)) == (None, False)


def test_a_damaged_file_counts_as_missing_and_may_be_stored_again(storage: Storage) -> None:
    blobs = Blobs(storage)
    name = blobs.put(b"something")
    storage.write(file_of(name), b"somethinG")
    assert blobs.has(name), "the damage was detected without reading the blob"
    assert blobs.get(name) is None
    assert not blobs.has(name)
    assert storage.read(file_of(name)) is None
    assert blobs.take(name, b"something")
    assert blobs.get(name) == b"something"
    storage.delete(file_of(name))
    assert blobs.get(name) is None, "a blob that another process removed was still read"


def test_a_fetched_blob_is_stored_only_under_its_own_hash(storage: Storage) -> None:
    blobs = Blobs(storage)
    assert not blobs.take(hash_of(b"this"), b"that")
    assert not blobs.take(hash_of(bytes(BLOB_BYTES_MAX + 1)), bytes(BLOB_BYTES_MAX + 1))
    with pytest.raises(LocalProtocolError, match="at most"):
        blobs.put(bytes(BLOB_BYTES_MAX + 1))
    assert storage.sizes("blobs") == {}


def test_files_that_are_not_blobs_are_left_alone(tmp_path: Path) -> None:
    store = FolderStorage(tmp_path)
    name = Blobs(store).put(b"one")
    for other in ("blobs/x", "blobs/ab/" + "0" * 64, f"blobs/00/{'zz' * 32}"):
        store.write(other, b"")
    (tmp_path / file_of(name)).with_suffix(".half").write_bytes(b"cut short")
    (tmp_path / "blobs" / "ab" / ("ab" * 32)).symlink_to(tmp_path / file_of(name))
    blobs = Blobs(store)
    assert blobs.bytes_here == 3
    blobs.sweep()
    assert len(store.sizes("blobs")) == 3


def test_a_sweep_removes_unpinned_blobs(storage: Storage) -> None:
    blobs = Blobs(storage)
    kept, gone, both = (blobs.put(data) for data in (b"kept", b"gone", b"both"))
    blobs.pin("a/1", sizes(b"kept", b"both"))
    blobs.pin("a/2", sizes(b"both"))
    assert blobs.sweep() == len(b"gone")
    assert (blobs.has(kept), blobs.has(gone), blobs.has(both)) == (True, False, True)
    again = Blobs(storage)
    assert again.labels("a/") == ["a/1", "a/2"]
    assert again.pinned("a/1") == (kept, both)
    assert again.sweep() == 0
    again.unpin("a/1")
    again.unpin("a/1")
    assert again.sweep() == len(b"kept")
    assert again.has(both)
    assert again.pinned("a/1") is None


def test_a_pin_protects_blobs_that_arrive_later(storage: Storage) -> None:
    blobs = Blobs(storage)
    blobs.pin("coming", sizes(b"late"))
    name = blobs.put(b"late")
    assert blobs.sweep() == 0
    assert Blobs(storage).has(name)


def test_no_blob_is_swept_while_blobs_are_held(storage: Storage) -> None:
    blobs = Blobs(storage)
    blobs.put(b"found again")
    with blobs.hold():
        name = blobs.put(b"found again")
        assert blobs.sweep() == 0
        blobs.pin("a", sizes(b"found again"))
    assert blobs.sweep() == 0
    assert blobs.get(name) == b"found again"


def test_guests_have_a_budget_apart_from_our_own_pins(storage: Storage) -> None:
    blobs = Blobs(storage, guest_bytes_max=10)
    blobs.pin("guest/1", sizes(b"123456"), is_guest=True)
    with pytest.raises(NoRoom, match="11 bytes for others, at most 10"):
        blobs.pin("guest/2", sizes(b"abcde"), is_guest=True)
    assert blobs.labels() == ["guest/1"]
    blobs.pin("guest/2", sizes(b"123456", b"abcd"), is_guest=True)
    assert blobs.guest_bytes == 10, "a blob in two pins was counted twice"
    blobs.pin("mine", sizes(b"123456", b"x" * 100))
    assert blobs.guest_bytes == 4, "a blob that one of our own pins holds counts against the guest budget"
    blobs.pin("guest/3", sizes(b"zzzzzz"), is_guest=True)
    with pytest.raises(NoRoom):
        blobs.pin("guest/3", sizes(b"zzzzzzz"), is_guest=True)
    assert blobs.pinned("guest/3") == tuple(sizes(b"zzzzzz")), "a failed pin replaced the former one"
    assert Blobs(storage).guest_bytes == blobs.guest_bytes
    blobs.unpin("mine")
    assert blobs.guest_bytes == 16, "blobs that we released do not count against the guest budget again"


def test_guests_have_a_limited_number_of_pins_of_any_size(storage: Storage) -> None:
    blobs = Blobs(storage, guest_pins_max=2)
    blobs.pin("mine", {})
    blobs.pin("guest/1", {}, is_guest=True)
    blobs.pin("guest/2", {}, is_guest=True)
    blobs.pin("guest/2", sizes(b"x"), is_guest=True)
    with pytest.raises(NoRoom, match="2 states of others"):
        blobs.pin("guest/3", {}, is_guest=True)
    assert blobs.labels() == ["guest/1", "guest/2", "mine"]


class FillingStorage(FolderStorage):
    """A storage folder on a disk that becomes full."""

    is_full = False

    def _sync(self, path: Path, flags: int) -> None:
        if self.is_full:
            raise OSError("no space left")
        super()._sync(path, flags)


def test_a_pin_that_cannot_be_written_is_not_listed(tmp_path: Path) -> None:
    storage = FillingStorage(tmp_path)
    blobs = Blobs(storage)
    name = blobs.put(b"one")
    storage.is_full = True
    with pytest.raises(OSError, match="no space"):
        blobs.pin("a", sizes(b"one"))
    storage.is_full = False
    assert blobs.labels() == []
    blobs.sweep()
    assert not blobs.has(name)


def test_a_damaged_pin_counts_as_missing(storage: Storage) -> None:
    Blobs(storage).pin("a", sizes(b"one"))
    storage.write("pins/b", b"\xff\xff")
    storage.write("pins/c", b"\x93\xc3\xc4\x01x\x91\x01")
    assert Blobs(storage).labels() == ["a"]


class SyncedStorage(FolderStorage):
    """A storage folder that records which paths were synced to the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.synced: list[str] = []

    def _sync(self, path: Path, flags: int) -> None:
        self.synced.append(str(path.relative_to(self.path)))
        super()._sync(path, flags)


def test_blobs_are_synced_together_at_the_time_they_are_pinned(tmp_path: Path) -> None:
    storage = SyncedStorage(tmp_path)
    blobs, synced = Blobs(storage), storage.synced
    names = [blobs.put(bytes([number])) for number in range(20)]
    assert synced == []
    blobs.pin("a", dict.fromkeys(names, 1))
    files = [place for place in synced if len(place) > 64]
    assert sorted(files) == sorted(map(file_of, names))
    assert {"blobs", ".", f"blobs/{names[0].hex()[:2]}"} <= set(synced), (
        "a new folder was not synced in its parent folder"
    )
    synced.clear()
    blobs.sync(names)
    assert synced == [], "blobs that were synced already were synced again"


def test_several_threads_may_put_one_blob_simultaneously(tmp_path: Path) -> None:
    blobs = Blobs(FolderStorage(tmp_path))
    data = os.urandom(100_000)
    barrier, failures = Barrier(8), []

    def put() -> None:
        barrier.wait()
        try:
            assert blobs.put(data) == hash_of(data)
        except OSError as error:
            failures.append(error)

    threads = [Thread(target=put) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert blobs.get(hash_of(data)) == data


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_a_stored_blob_can_be_read_back(several: list[bytes]) -> None:
    storage = MemoryStorage()
    names = [Blobs(storage).put(data) for data in several]
    assert [Blobs(storage).get(name) for name in names] == several


class PinsAndSweeps(RuleBasedStateMachine):
    """Compares pins with a model: a dictionary from labels to sets of blobs."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = MemoryStorage()
        self.blobs = Blobs(self.storage, guest_bytes_max=12)
        self.pins: dict[str, tuple[bool, set[int]]] = {}
        self.here: set[int] = set()

    names = st.integers(1, 6)

    @rule(number=names)
    def put(self, number: int) -> None:
        self.blobs.put(bytes(number))
        self.here.add(number)

    @rule(label=st.sampled_from("abc"), several=st.sets(names), is_guest=st.booleans())
    def pin(self, label: str, several: set[int], is_guest: bool) -> None:
        pins = self.pins | {label: (is_guest, several)}
        wanted = {hash_of(bytes(number)): number for number in several}
        if is_guest and self.guest_bytes(pins) > 12:
            with pytest.raises(NoRoom):
                self.blobs.pin(label, wanted, is_guest=True)
        else:
            self.blobs.pin(label, wanted, is_guest=is_guest)
            self.pins = pins

    @rule(label=st.sampled_from("abc"))
    def unpin(self, label: str) -> None:
        self.blobs.unpin(label)
        self.pins.pop(label, None)

    @rule()
    def sweep(self) -> None:
        held = set().union(*(several for _, several in self.pins.values()))
        assert self.blobs.sweep() == sum(self.here - held)
        self.here &= held

    @rule()
    def restart(self) -> None:
        self.blobs = Blobs(self.storage, guest_bytes_max=12)

    @staticmethod
    def guest_bytes(pins: dict[str, tuple[bool, set[int]]]) -> int:
        own = set().union(*(several for is_guest, several in pins.values() if not is_guest))
        return sum(set().union(*(several for is_guest, several in pins.values() if is_guest)) - own)

    @invariant()
    def agrees(self) -> None:
        assert self.blobs.bytes_here == sum(self.here)
        assert self.blobs.guest_bytes == self.guest_bytes(self.pins)
        assert self.blobs.labels() == sorted(self.pins)


TestPinsAndSweeps = PinsAndSweeps.TestCase
