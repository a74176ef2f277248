"""The data folder: atomic writes, safe names, a single process, and keys that only their owner can read."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crypto.contact import parse_address
from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity, PeerId
from node.checkpoints.replication import Which
from node.checkpoints.weights import weights_name
from node.errors import UsageError
from node.paths import LOCK_NAME
from node.protocols.runs import End, FetchWeights
from node.runs.recovery import run_name
from node.storage.folder import IDENTITY_NAME, FolderStorage, parts_of
from node.storage.folder_lock import find_holder, lock
from node.storage.keys import load_keys
from node.storage.known_peers import REMEMBERED_MAX, read_remembered, write_remembered
from tests.source import ROOT


def entropy(count: int) -> bytes:
    return bytes(range(count))


def test_a_blob_survives_a_restart_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "data")
    assert storage.read("runs/a/plan") is None
    storage.write("runs/a/plan", b"old")
    storage.write("runs/a/plan", b"new")
    assert FolderStorage(tmp_path / "data").read("runs/a/plan") == b"new"
    assert stat.S_IMODE((tmp_path / "data" / "runs/a/plan").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    storage.delete("runs/a/plan")
    storage.delete("runs/a/plan")
    assert storage.read("runs/a/plan") is None


def test_a_write_that_fails_midway_leaves_the_old_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FolderStorage(tmp_path)
    storage.write("a", b"old")

    def die(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(OSError, match="no space"):
            storage.write("a", b"new")
    assert storage.read("a") == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"], "the failed write left bytes on the disk"
    storage.write("a", b"newer")
    assert storage.read("a") == b"newer"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "a//b", ".hidden", "a/../b", "a\0", "a.half", "é"])
def test_a_name_cannot_lead_outside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(LocalProtocolError):
        FolderStorage(tmp_path).write(name, b"")


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="data folder") as caught:
            FolderStorage(path)
        assert "--data-dir" in (caught.value.do or "")


def test_a_data_folder_belongs_to_one_process(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, node.storage.folder_lock as f\nwith f.lock(pathlib.Path(sys.argv[1])): pass"
    )
    with lock(tmp_path):
        second = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
        )
        assert f"this node already runs: process {os.getpid()} holds {tmp_path}" in second.stderr
        with pytest.raises(UsageError) as caught, lock(tmp_path):
            pass
        assert caught.value.exit_code == 2
        assert (caught.value.do or "").startswith(f"look: python -m node status --data-dir {tmp_path} ")
    with lock(tmp_path):
        pass


NOBODY = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@as_root
def test_a_data_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(UsageError, match=r"belongs to user .*, and this is user") as caught:
        FolderStorage(folder)
    assert "--data-dir" in (caught.value.do or "")
    assert list(folder.iterdir()) == []


def test_an_empty_folder_and_the_nodes_own_are_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o777)  # it is empty, so no other user can have put anything in it
    load_keys(FolderStorage(folder), entropy)
    assert mode_of(folder) == 0o700
    folder.chmod(0o755)  # a node's own folder, which others could read
    FolderStorage(folder)
    assert mode_of(folder) == 0o700


@pytest.mark.parametrize(
    ("name", "mode", "reason"),
    [
        ("identity.key", 0o770, r"others may write in it \(mode 0770\)"),
        ("identity.key", 0o1777, r"others may write in it \(mode 1777\)"),
        ("letter.txt", 0o755, r"open to others \(mode 0755\), and does not look like a node's folder"),
    ],
)
def test_a_folder_open_to_others_with_files_is_refused_unchanged(
    tmp_path: Path, name: str, mode: int, reason: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_text("")
    folder.chmod(mode)
    with pytest.raises(UsageError, match=reason) as caught:
        FolderStorage(folder)
    assert f"chmod 700 {folder}" in (caught.value.do or "")
    assert mode_of(folder) == mode


def test_a_lock_that_is_a_link_is_refused_and_its_target_untouched(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("not to be truncated")
    for link in (os.symlink, os.link):
        link(precious, tmp_path / LOCK_NAME)
        with (
            pytest.raises(UsageError, match=f"{LOCK_NAME}.* is a (symbolic |hard )?link") as caught,
            lock(tmp_path),
        ):
            pass
        assert caught.value.do == f"check what it is; to remove it: rm {tmp_path / LOCK_NAME}"
        (tmp_path / LOCK_NAME).unlink()
    assert precious.read_text() == "not to be truncated"
    os.mkfifo(tmp_path / LOCK_NAME)
    with pytest.raises(UsageError, match=f"{LOCK_NAME}.* is not a file"), lock(tmp_path):
        pass


@as_root
def test_an_inspection_in_a_different_thread_does_not_lose_the_lock(tmp_path: Path) -> None:
    """A process loses a record lock when it closes any descriptor of the file."""
    stopped = threading.Event()

    def look() -> None:
        while not stopped.is_set():
            find_holder(tmp_path)

    tmp_path.chmod(0o700)
    program = (
        "import sys\nfrom pathlib import Path\nfrom node.storage.folder_lock import find_holder\n"
        "for line in sys.stdin: print(find_holder(Path(line.strip())), flush=True)"
    )
    threads = [threading.Thread(target=look) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            for thread in threads:
                thread.start()
            for _ in range(100):
                with lock(tmp_path):
                    other.stdin.write(f"{tmp_path}\n")
                    other.stdin.flush()
                    assert other.stdout.readline() == f"{os.getpid()}\n"
        finally:
            stopped.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(interval)
            other.stdin.close()


def test_a_lock_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("")
    os.chown(tmp_path / LOCK_NAME, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="belongs to user"), lock(tmp_path):
        pass


def test_a_lock_file_open_to_others_is_made_private(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("")
    (tmp_path / LOCK_NAME).chmod(0o666)
    with lock(tmp_path):
        assert mode_of(tmp_path / LOCK_NAME) == 0o600


@pytest.mark.parametrize("name", ["peers.json", "blobs/ab", "runs/a/weights"])
def test_a_write_replaces_a_link_instead_of_following_it(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("not to be written to")
    storage = FolderStorage(tmp_path / "data")
    path = tmp_path / "data" / name
    path.parent.mkdir(exist_ok=True, parents=True)
    for planted in (path, path.with_name(path.name + ".half")):
        planted.symlink_to(precious)
    storage.write(name, b"new")
    assert storage.read(name) == b"new"
    assert precious.read_text() == "not to be written to"
    assert not path.is_symlink()


def test_half_written_files_are_removed_at_the_next_start(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    storage.write("runs/a/weights", b"whole")
    (tmp_path / "runs" / "a" / "weights.half").write_bytes(b"ha")
    (tmp_path / "peers.json.half").symlink_to(tmp_path / "runs")
    storage.remove_halves()
    assert [path.name for path in tmp_path.rglob("*") if path.name.endswith(".half")] == []
    assert storage.read("runs/a/weights") == b"whole"


def test_keys_are_made_once_and_then_kept(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    made = load_keys(storage, entropy)
    kept = load_keys(storage, lambda count: bytes(count))
    assert (made.is_new, kept.is_new) == (True, False)
    assert made.identity.peer == kept.identity.peer == Identity(entropy(32)).peer
    assert made.static == kept.static
    assert made.static.hex() not in repr(made)
    assert stat.S_IMODE((tmp_path / IDENTITY_NAME).stat().st_mode) == 0o600


def test_a_key_file_open_to_others_is_refused_with_a_chmod_remedy(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    load_keys(storage, entropy)
    (tmp_path / IDENTITY_NAME).chmod(0o644)
    with pytest.raises(UsageError, match=r"open to others \(mode 0644\)") as caught:
        load_keys(storage, entropy)
    assert caught.value.do == f"chmod 600 {tmp_path / IDENTITY_NAME}"


def test_a_key_file_of_a_wrong_size_is_refused_and_never_overwritten(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    for data in (b"", b"short", bytes(33)):
        storage.write(IDENTITY_NAME, data)
        with pytest.raises(UsageError, match="a key has 32"):
            load_keys(storage, entropy)
        assert storage.read(IDENTITY_NAME) == data


def test_a_key_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / IDENTITY_NAME, 0o600)
    with pytest.raises(UsageError, match="not a file"):
        load_keys(FolderStorage(tmp_path), entropy)


def test_an_identity_that_is_a_link_is_refused(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "data")
    (tmp_path / "other.key").write_bytes(entropy(32))
    (tmp_path / "other.key").chmod(0o600)
    (tmp_path / "data" / IDENTITY_NAME).symlink_to(tmp_path / "other.key")
    with pytest.raises(UsageError, match="is a link"):
        load_keys(storage, entropy)


@as_root
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    load_keys(storage, entropy)
    os.chown(tmp_path / IDENTITY_NAME, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="belongs to user"):
        load_keys(storage, entropy)


def test_remembered_peers_are_restored_in_order_and_bounded(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    assert read_remembered(storage) == ()
    peers = [
        (parse_address(f"10.0.0.{number}:9747").of(PeerId(bytes([number]) * 32)),)
        for number in range(1, REMEMBERED_MAX + 10)
    ]
    write_remembered(storage, peers)
    assert read_remembered(storage) == tuple(peers[:REMEMBERED_MAX])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"schema":"","peers":[{"peer":"x","addresses":["a:1"]}]}',
        b'{"schema":"","peers":[1]}',
    ],
)
def test_a_damaged_list_of_remembered_peers_counts_as_empty(tmp_path: Path, data: bytes) -> None:
    storage = FolderStorage(tmp_path)
    storage.write("peers.json", data)
    assert read_remembered(storage) == ()


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (lambda text: FetchWeights(text), lambda got: weights_name(got.run)),
        (lambda text: End(bytes(32), "done", "", 4 * text), lambda got: weights_name(got.weights or "none")),
        (lambda text: Which(text), lambda got: run_name(got.run)),
    ],
    ids=["weights", "result", "which"],
)
def test_a_name_from_the_wire_is_refused_or_valid_for_storage(
    message: Callable[[str], Any], name: Callable[[Any], str]
) -> None:
    good = "0123456789abcdef"
    assert taken(message(good)) is not None
    for letter in "\n\r\0/.\\~ éA٣":
        for at in (0, 8, 15, 16):
            got = taken(message(good[:at] + letter + good[at + 1 :]))
            assert got is None or parts_of(name(got))
        assert taken(message(good + letter)) is None


def taken(message: Any) -> Any:
    """Return a message as its receiver decodes it; None if it is refused."""
    try:
        return decode(encode(message), type(message), bytes_max=1_000)
    except RemoteProtocolError:
        return None
