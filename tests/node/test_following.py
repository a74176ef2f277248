"""Settings that nodes follow from a key: when they are accepted or refused, and that they survive a
restart."""

from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner, Signer
from crypto.identity import Identity, peer_text
from node import toml
from node.cli.settings_file import SharedSettings, settings_in
from node.config import Config, Follow
from node.errors import UsageError
from node.following import PublishRequest, SettingsFollower
from node.offering import FOLLOWABLE
from node.placement.provider import CHANGEABLE, Provider
from node.protocols.followed import (
    SETTINGS_BYTES_MAX,
    SettingsBody,
    SharedSetting,
    fact_in,
    fact_of,
    file_of,
    read_settings,
    sign_settings,
)
from node.seams import RealClock
from node.settings_events import NodeConfigured
from node.storage.folder import FolderStorage

FLEET, OTHER, ME = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
SWARM = "default"


def signed(version: int, by: Identity = FLEET, swarm: str = SWARM, **settings: str) -> Fact:
    rows = tuple(SharedSetting(name, value) for name, value in settings.items())
    return sign_settings(IdentitySigner(by, swarm), SettingsBody(version, "fleet", rows))


class World:
    """The part of a node that following settings needs, with DHT values as any peer may have stored them."""

    def __init__(self, folder: Path, **follow: Any) -> None:
        self.config = Config(follow=Follow(FLEET.peer, **follow))
        self.provider = Provider(self.config, RealClock())
        self.signer: Signer = IdentitySigner(ME, SWARM)
        self.seams: Any = SimpleNamespace(clock=RealClock(), storage=FolderStorage(folder))
        self.journal: Any = SimpleNamespace(counts=Counter())
        self.membership: Any = None
        self.told: list[NodeConfigured] = []
        self.values: list[bytes] = []
        self.dht: Any = self
        self.following = SettingsFollower(self)

    async def read_all(self, key: str, bytes_max: int) -> list[bytes]:
        assert key == f"settings/{peer_text(FLEET.peer)}"
        return [value for value in self.values if len(value) <= bytes_max]

    async def put(self, key: str, value: bytes, ttl_seconds: float) -> None:
        self.values.append(value)

    def publish(self, event: Any) -> None:
        self.told.append(event)

    def broadcast(self, topic: str, data: bytes) -> None:
        """Discard events."""

    def set(self, name: str, text: str | None) -> None:
        self.provider.set(name, text)

    async def look(self, *facts: Fact) -> str:
        """Let the follower find these facts, and return its settings: hours and slots."""
        self.values = [encode(fact) for fact in facts]
        await self.following._look(FLEET.peer)
        return f"{self.provider.rules.hours} {self.provider.rules.slots}"


async def test_the_highest_version_is_applied_and_older_ones_are_ignored(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.following.restore()
    assert world.told[-1].version == 0
    night, day = signed(2, hours="22:00-07:00", slots="3"), signed(3, hours="08:00-18:00")
    assert await world.look(night) == "22:00-07:00 3"
    assert await world.look(night, day) == "08:00-18:00 1", (
        "an omitted setting did not return to the owner's value"
    )
    assert (world.told[-1].version, world.told[-1].settings) == (3, ("hours = 08:00-18:00",))
    assert await world.look(night) == "08:00-18:00 1"
    assert await world.look(signed(3, hours="always")) == "08:00-18:00 1", (
        "the content of an applied version was replaced"
    )


async def test_applied_settings_survive_a_restart_of_the_node(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.look(signed(4, hours="22:00-07:00"))
    again = World(tmp_path)
    again.following.restore()
    assert str(again.provider.rules.hours) == "22:00-07:00"
    assert (again.told[-1].version, again.told[-1].since) == (4, world.told[-1].since)
    assert await again.look(signed(3, hours="always")) == "22:00-07:00 1"
    # A node that now follows a different key forgets the settings of the first key.
    other = World(tmp_path)
    other.following._key = OTHER.peer
    other.following.restore()
    assert other.told[-1].version == 0


@pytest.mark.parametrize(
    "fact",
    [
        signed(9, by=OTHER, hours="00:00-01:00"),
        signed(9, swarm="another", hours="00:00-01:00"),
        Fact(FLEET.peer, signed(9, by=OTHER, hours="00:00-01:00").body, bytes(64)),
        Fact(FLEET.peer, b"no settings", bytes(64)),
        Fact(FLEET.peer, encode(SettingsBody(9, "x" * 40, ())) + b"more", bytes(64)),
    ],
    ids=["another key", "another swarm", "a wrong signature", "no settings", "bytes behind them"],
)
async def test_settings_not_signed_by_the_followed_key_are_refused(fact: Fact, tmp_path: Path) -> None:
    world = World(tmp_path)
    assert await world.look(signed(2, hours="22:00-07:00"), fact) == "22:00-07:00 1"
    assert world.following._taken is not None
    assert world.following._taken.version == 2
    assert sum(world.journal.counts.values()) == 1


async def test_only_settings_that_the_owner_allows_are_applied(tmp_path: Path) -> None:
    world = World(tmp_path, allow=("hours",))
    fact = signed(2, hours="22:00-07:00", slots="3", listen="0.0.0.0:1", own_data="x=/etc", follow="x")
    assert await world.look(fact) == "22:00-07:00 1"
    assert len(world.told[-1].skipped) == 4
    assert await world.look(signed(3, hours="whenever")) == " 1", "an unreadable setting was applied"
    assert list(world.told[-1].skipped) == ["hours (this version cannot read its value)"]


def test_no_device_location_or_data_path_can_be_followed() -> None:
    assert set(FOLLOWABLE) < set(CHANGEABLE), (
        "a setting that can be followed cannot be changed while the node runs"
    )
    assert not {"device", "location", "own_data"} & set(FOLLOWABLE)


def test_hostile_settings_documents_are_refused(tmp_path: Path) -> None:
    signer = IdentitySigner(ME, SWARM)
    many = tuple(SharedSetting(f"s{number}", "x") for number in range(33))
    twice = (SharedSetting("hours", "always"), SharedSetting("hours", ""))
    for rows in (many, twice, (SharedSetting("hours", "x" * 5_000),)):
        fact = IdentitySigner(FLEET, SWARM).sign(
            "settings", encode([5, "x", [[r.name, r.value] for r in rows]])
        )
        with pytest.raises(RemoteProtocolError):
            read_settings(signer, fact)
    assert fact_in(bytes(SETTINGS_BYTES_MAX + 1), FLEET.peer) is None
    rng = Random(7)
    for size in range(200):
        assert fact_in(rng.randbytes(size), FLEET.peer) is None
    for text in ("", "{}", "[" * 10_000, '{"schema": "peerloom/settings/1"}', "\ud800"):
        with pytest.raises(ValueError, match=r"signed settings|not a"):
            fact_of(text)
    whole = file_of(signed(5, hours="always"), 5).decode()
    assert read_settings(signer, fact_of(whole)).version == 5


async def test_a_version_is_published_once_and_versions_only_increase(tmp_path: Path) -> None:
    world = World(tmp_path)
    text = file_of(signed(5, hours="22:00-07:00"), 5).decode()
    document: Any = await world.following._publish(PublishRequest(text), None)  # type: ignore[arg-type]  # it tells nothing while it works
    assert (document["version"], document["name"], document["is_stored"]) == (5, "fleet", True)
    assert str(world.provider.rules.hours) == "22:00-07:00", (
        "the publisher's own node does not follow the key"
    )
    with pytest.raises(UsageError, match="version 5 is not above version 5"):
        await world.following._publish(PublishRequest(text), None)  # type: ignore[arg-type]  # it tells nothing while it works
    foreign = file_of(signed(6, swarm="another"), 6).decode()
    with pytest.raises(UsageError, match="not settings signed for swarm default"):
        await world.following._publish(PublishRequest(foreign), None)  # type: ignore[arg-type]  # it tells nothing while it works


def test_a_bad_settings_file_is_refused_with_its_line() -> None:
    def read(text: str) -> list[tuple[str, str]]:
        return [(e.name, e.value) for e in settings_in(toml.parse(text, SharedSettings, name="f.toml"))]

    text = 'version = 3\n[offer]\nhours = "22:00-07:00"\nmains_only = true\n[resources]\ncores = 2\n'
    assert dict(read(text)) == {"hours": "22:00-07:00", "mains_only": "true", "cores": "2"}
    with pytest.raises(UsageError, match=r"^f\.toml:3: each owner decides location"):
        read('version = 3\n[resources]\nlocation = "x"\n')
    with pytest.raises(UsageError, match=r"^f\.toml:3: hours whenever: want times"):
        read('version = 3\n[offer]\nhours = "whenever"\n')
    with pytest.raises(UsageError, match=r"unknown table|unknown key"):
        read('version = 3\n[listen]\naddresses = ["0.0.0.0:1"]\n')
