"""Settings that many nodes take from one key. They are published in the DHT, and nodes that follow the key
apply them.

    [follow]
    key = "12D3KooW..."               # the key whose signed settings this node follows
    allow = ["hours", "upload"]       # the settings it may set; "all" or absent: all that are followable

Any node may store the values, under `settings/<key>` in the DHT: only the signature counts, and the highest
version wins. A broadcast announces a newer version, so nodes check immediately; they also check regularly.
Adopted settings survive a restart, and an older version is never adopted again. A setting that a newer
version leaves out returns to the value of the node's owner.

Only limits, hours and offers can be set this way (`node.offering.FOLLOWABLE`): no key, address, path or
program.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Protocol

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId, peer_text
from node.config import Config
from node.containment import contain, keep_running
from node.content.directory import Directory, NotStored
from node.control import CommandHandler, Emit
from node.errors import UsageError
from node.events import Event
from node.journal import Journal
from node.offering import ALL_FOLLOWABLE, FOLLOWABLE
from node.protocols.followed import (
    SETTINGS_BYTES_MAX,
    VERSION_MAX,
    SettingsBody,
    fact_in,
    fact_of,
    read_settings,
)
from node.requests import command
from node.seams import Seams
from node.services.membership import Membership
from node.settings_events import NodeConfigured

LOOK_SECONDS = 60.0
"""Seconds between checks for a newer version when no broadcast announces one."""
LOOK_SECONDS_MIN = 2.0
"""Minimum seconds between two checks, however many broadcasts announce a version."""
STORE_SECONDS = 3_600.0
"""Seconds after which a published version is stored again, because nodes come and go."""
RETRY_SECONDS = 5.0
"""Seconds after which storing is retried while too few nodes keep the version."""
LIFETIME_SECONDS = 24 * 3_600.0
TOPIC = "settings"
_TAKEN, _PUBLISHED = "followed-settings", "published-settings"


class PublishRequest(msgspec.Struct, frozen=True):
    """Store signed settings, given as the text of their file, for the nodes that follow their key."""

    document: Annotated[str, msgspec.Meta(max_length=4 * SETTINGS_BYTES_MAX)]


class _Hint(msgspec.Struct, frozen=True, array_like=True):
    """A broadcast that announces a version of a key's settings."""

    key: Annotated[bytes, msgspec.Meta(max_length=64)]
    version: Annotated[int, msgspec.Meta(ge=1, lt=VERSION_MAX)]


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """Settings stored on this node's disk; `since` is when they were adopted, in Unix seconds."""

    fact: Fact
    since: float


class FollowingNode(Protocol):
    """The part of `node.runtime.Node` that following uses."""

    config: Config
    seams: Seams
    signer: Signer
    membership: Membership
    journal: Journal

    @property
    def dht(self) -> Directory: ...
    def publish(self, event: Event) -> None: ...
    def broadcast(self, topic: str, data: bytes) -> None: ...
    def set(self, name: str, text: str | None) -> None: ...


class SettingsFollower:
    """Follows and publishes settings for one node. Call `restore` once, before `run`."""

    def __init__(self, node: FollowingNode) -> None:
        self._node = node
        self._key = node.config.follow.key
        allowed = node.config.follow.allow
        self._allowed = frozenset(FOLLOWABLE if ALL_FOLLOWABLE in allowed else allowed)
        self._taken: SettingsBody | None = None
        self._applied: dict[str, str] = {}
        self._published: tuple[Fact, SettingsBody] | None = None
        self._hinted = trio.Event()
        self._store_soon = trio.Event()
        self._counts: Counter[str] = node.journal.counts

    @property
    def handlers(self) -> Mapping[str, CommandHandler]:
        """Handlers for `node.control.ControlServer`."""
        return {"config.publish": command(PublishRequest, self._publish)}

    def restore(self) -> None:
        """Apply the settings that were adopted before this node was started."""
        if (found := self._kept(_PUBLISHED)) is not None:
            self._published = found[0].fact, found[1]
        if self._key is None:
            return
        found = self._kept(_TAKEN)
        if found is not None and found[0].fact.author == self._key:
            self._apply(found[1], found[0].since)
        else:
            self._tell(SettingsBody(1, "", ()), 0, 0.0, [])

    async def run(self) -> None:
        """Check for newer versions, and keep published settings stored, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_stored)
            if self._key is not None:
                nursery.start_soon(self._listen, self._key)
                while True:
                    self._hinted = trio.Event()
                    with contain("looking for settings"):
                        await self._look(self._key)
                    with trio.move_on_after(LOOK_SECONDS):
                        await trio.sleep(LOOK_SECONDS_MIN)
                        await self._hinted.wait()

    # Following

    async def _look(self, key: PeerId) -> None:
        for data in await self._node.dht.read_all(_name(key), SETTINGS_BYTES_MAX):
            fact = fact_in(data, key)
            if fact is None:
                self._counts["settings_refused_other_author"] += 1
            else:
                await self._offer(fact)

    async def _offer(self, fact: Fact) -> None:
        """Adopt settings if they are newer and the followed key has signed them."""
        try:
            body = read_settings(self._node.signer, fact)
        except RemoteProtocolError:
            self._counts["settings_refused"] += 1
            return
        held = 0 if self._taken is None else self._taken.version
        if body.version <= held:
            self._counts["settings_refused_older"] += body.version < held
            return
        now = self._node.seams.clock.wall()
        # Write to the disk first, so that an adopted version is never replaced by an older one after a crash.
        self._node.seams.storage.write(_TAKEN, encode(_Kept(fact, now)))
        self._apply(body, now)

    def _apply(self, body: SettingsBody, since: float) -> None:
        wanted = {each.name: each.value for each in body.settings}
        skipped = [f"{name} (not allowed here)" for name in wanted if name not in self._allowed]
        for name in [name for name in self._applied if name not in wanted]:
            del self._applied[name]
            self._node.set(name, None)
        for name, value in wanted.items():
            if name not in self._allowed or self._applied.get(name) == value:
                continue
            try:
                self._node.set(name, value)
            except UsageError:
                skipped.append(f"{name} (this version cannot read its value)")
                if self._applied.pop(name, None) is not None:
                    self._node.set(name, None)
            else:
                self._applied[name] = value
        self._taken = body
        self._tell(body, body.version, since, skipped)

    def _tell(self, body: SettingsBody, version: int, since: float, skipped: list[str]) -> None:
        assert self._key is not None
        self._node.publish(
            NodeConfigured(
                at=self._node.seams.clock.wall(),
                key=self._key,
                name=body.name if body.name.isprintable() else "",
                version=version,
                since=since,
                settings=tuple(f"{name} = {value}" for name, value in sorted(self._applied.items())),
                skipped=tuple(skipped),
            )
        )

    async def _listen(self, key: PeerId) -> None:
        """Wait for announcements of a newer version. Anybody may send one, so it only triggers a check."""
        with self._node.membership.listeners.listen() as heard:
            async for told in heard:
                with suppress(RemoteProtocolError):
                    hint: _Hint | None = None
                    if told.topic == TOPIC:
                        hint = decode(told.data, _Hint, bytes_max=len(told.data))
                    held = 0 if self._taken is None else self._taken.version
                    if hint is not None and hint.key == key and hint.version > held:
                        self._hinted.set()

    # Publishing

    async def _publish(self, request: PublishRequest, _emit: Emit) -> object:
        try:
            fact = fact_of(request.document)
            body = read_settings(self._node.signer, fact)
        except (ValueError, RemoteProtocolError) as error:
            raise UsageError(
                f"these are not settings signed for swarm {self._node.config.swarm.name}: {error}",
                "sign them: `peerloom config sign FILE --swarm NAME`",
            ) from None
        before = self._published
        if before is not None and before[0].author == fact.author and before[1].version >= body.version:
            raise UsageError(
                f"version {body.version} is not above version {before[1].version}, which was published here",
                f"write version = {before[1].version + 1} into the file, and sign it again",
            )
        self._node.seams.storage.write(_PUBLISHED, encode(_Kept(fact, self._node.seams.clock.wall())))
        self._published = fact, body
        if fact.author == self._key:
            await self._offer(fact)
        key = peer_text(PeerId(fact.author))
        document = {"key": key, "name": body.name, "version": body.version, "is_stored": True, "reason": ""}
        try:
            await self._store()
        except NotStored as error:
            document |= {"is_stored": False, "reason": error.what}
            self._store_soon.set()
        return document

    async def _store(self) -> None:
        """Store what was published here, and announce it. Raises NotStored."""
        if self._published is None:
            return
        fact, body = self._published
        key = PeerId(fact.author)
        try:
            await self._node.dht.put(_name(key), encode(fact), LIFETIME_SECONDS)
        finally:
            with suppress(UsageError):
                self._node.broadcast(TOPIC, encode(_Hint(key, body.version)))

    async def _keep_stored(self) -> None:
        while True:
            seconds = STORE_SECONDS
            with contain("storing settings"):
                try:
                    await self._store()
                except NotStored:
                    seconds = RETRY_SECONDS
            self._store_soon = trio.Event()
            with trio.move_on_after(seconds):
                await self._store_soon.wait()
                await trio.sleep(RETRY_SECONDS)

    def _kept(self, name: str) -> tuple[_Kept, SettingsBody] | None:
        """Return settings from this node's disk, verified like those from the network; None if missing or
        invalid."""
        data = self._node.seams.storage.read(name)
        with suppress(RemoteProtocolError):
            if data is not None:
                kept: _Kept = decode(data, _Kept, bytes_max=2 * SETTINGS_BYTES_MAX)
                return kept, read_settings(self._node.signer, kept.fact)
        return None


def start_following(node: FollowingNode, nursery: trio.Nursery) -> Mapping[str, CommandHandler]:
    """Start following settings for a node, whether daemon or embedded in a program; return its commands."""
    following = SettingsFollower(node)
    following.restore()
    nursery.start_soon(keep_running, "following", following.run)
    return following.handlers


def _name(key: PeerId) -> str:
    return f"{TOPIC}/{peer_text(key)}"
