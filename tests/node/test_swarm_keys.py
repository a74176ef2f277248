"""The key file of a private swarm: its valid forms, and the errors for all other files."""

import base64
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.swarm import SWARM_KEYS_MAX
from node.config import Config, resolve
from node.errors import Unreachable, UsageError
from node.runtime import Node
from node.storage.swarm_keys import KEY_FILE_BYTES_MAX, load_swarm_keys, read_swarm_key
from node.transport.settings import TransportSettings
from tests.node.nets import make_network

KEYS = [bytes(range(start, start + 32)) for start in range(SWARM_KEYS_MAX + 1)]


def key_file(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "swarm.key"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_keys_are_read_in_order_in_hex_and_base64_with_comments(tmp_path: Path) -> None:
    text = f"# since March\n\n{KEYS[0].hex()}\n  {base64.b64encode(KEYS[1]).decode()}  # the one before\r\n"
    text += KEYS[2].hex().upper()
    assert load_swarm_keys(key_file(tmp_path, text)) == tuple(KEYS[:3])


@given(st.binary(min_size=32, max_size=32).filter(lambda key: len(set(key)) > 1))
def test_every_key_can_be_read_in_both_notations(key: bytes) -> None:
    assert read_swarm_key(key.hex()) == read_swarm_key(base64.b64encode(key).decode()) == key


@given(st.text(max_size=70))
def test_a_malformed_key_is_refused_but_not_shown(text: str) -> None:
    with pytest.raises(ValueError, match="a key") as refusal:
        read_swarm_key(text)
    assert len(text) < 3 or text not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{KEYS[0].hex()}\nsecret word\n", ":2: not a key; want 32 bytes"),
        (f"# one\n{KEYS[0].hex()[:-2]}", ":2: not a key"),
        (b"\xff\xfe\n", ":1: not a key"),
        ("\n" + "00" * 32, ":2: all bytes of this key are the same"),
        (f"{KEYS[0].hex()}\n#\n{base64.b64encode(KEYS[0]).decode()}", ":3: this is the key of line 1 again"),
        ("# nothing yet\n", "has no key"),
        ("\n".join(key.hex() for key in KEYS), "has 5 keys; at most 4"),
        ("#" * (KEY_FILE_BYTES_MAX + 1), "more than 16384 bytes"),
    ],
)
def test_a_wrong_key_file_is_refused_with_its_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = key_file(tmp_path, text)
    with pytest.raises(UsageError) as refusal:
        load_swarm_keys(path)
    assert words in refusal.value.what
    assert "secret word" not in f"{refusal.value.what}{refusal.value.do}"


def test_a_missing_key_file_says_how_to_make_one(tmp_path: Path) -> None:
    path = tmp_path / "my swarm.key"
    with pytest.raises(UsageError, match="does not exist") as refusal:
        load_swarm_keys(path)
    assert refusal.value.do is not None
    command = refusal.value.do.partition(": ")[2]
    assert os.system(command) == 0
    assert len(load_swarm_keys(path)) == 1


def test_a_key_file_that_others_may_read_gets_a_chmod_remedy(tmp_path: Path) -> None:
    path = key_file(tmp_path, KEYS[0].hex(), mode=0o640)
    with pytest.raises(UsageError, match=r"open to others \(mode 0640\)") as refusal:
        load_swarm_keys(path)
    assert refusal.value.do == f"chmod 600 {path}"
    with pytest.raises(UsageError, match="not a file"):
        load_swarm_keys(tmp_path)


def test_a_config_names_the_key_file_relative_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[swarm]\nkey_file = "home.key"\n')
    assert Config.load(file).swarm.key_file == tmp_path / "home.key"
    file.write_text('[swarm]\nkey_file = ""\n')
    assert Config.load(file).swarm.key_file is None
    assert resolve({}, {"PEERLOOM_KEY_FILE": "/run/home.key"}).swarm.key_file == Path("/run/home.key")


async def test_only_members_connect_to_a_node_with_a_key_file(
    tmp_path: Path,
) -> None:
    path = key_file(tmp_path, KEYS[0].hex())
    environment = {"PEERLOOM_KEY_FILE": str(path), "PEERLOOM_DATA_DIR": str(tmp_path / "data")}
    environment |= {"PEERLOOM_LISTEN": "127.0.0.1:0", "PEERLOOM_SWARM": "test"}
    environment["PEERLOOM_CALIBRATE"] = "false"
    async with Node(resolve({}, environment)) as node:
        hasty = TransportSettings(handshake_seconds=0.2)
        member, outsider = (
            make_network("m", keys=[KEYS[0]]),
            make_network("o", keys=[KEYS[1]], settings=hasty),
        )
        address = node.network.addresses[0]
        assert await member.identify(address) == node.peer
        with pytest.raises(Unreachable):
            await outsider.identify(address)


async def test_a_node_with_a_wrong_key_file_does_not_start_unprotected(tmp_path: Path) -> None:
    environment = {"PEERLOOM_KEY_FILE": str(tmp_path / "none"), "PEERLOOM_DATA_DIR": str(tmp_path / "data")}
    with pytest.raises(UsageError, match="does not exist"):
        async with Node(resolve({}, environment | {"PEERLOOM_LISTEN": "127.0.0.1:0"})):
            pass
