"""Keys for the HTTP forms. Each is made once, shown once, and kept as a hash in the data folder.

A key is 32 random bytes, so a fast hash is as good as a slow one. A key only lets a program use models; the
page's token lets the owner act on the node.
"""

from base64 import urlsafe_b64encode
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from blake3 import blake3

from node.control import CommandHandler, Emit
from node.errors import UsageError
from node.requests import Nothing, command
from node.seams import Seams
from node.web.quotas import IN_FLIGHT_MAX, IN_FLIGHT_USUAL

KEYS_NAME = "api-keys"
"""Name of the blob that stores the keys."""
KEYS_MAX = 256
KEY_BYTES = 32
KEY_LENGTH_MAX = 128
"""Maximum length of a key. Longer texts are not our keys, and are not hashed."""
NAME_LENGTH_MAX = 64
PREFIX = "pl-"


class ApiKey(msgspec.Struct, frozen=True):
    """One key: its hash, and what it permits."""

    id: str
    name: str
    digest: bytes
    made_at: float
    in_flight_max: Annotated[int, msgspec.Meta(ge=1, le=IN_FLIGHT_MAX)] = IN_FLIGHT_USUAL


class NewKeyRequest(msgspec.Struct, frozen=True):
    """A request to make a key with a limit of concurrent requests."""

    name: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)] = ""
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=IN_FLIGHT_MAX)] = IN_FLIGHT_USUAL


class RevokeKeyRequest(msgspec.Struct, frozen=True):
    """A request to revoke the key with this id or name."""

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]


class KeyRing:
    """All keys of one node."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._keys: dict[bytes, ApiKey] = {}
        data = seams.storage.read(KEYS_NAME)
        if data:
            try:
                kept = msgspec.msgpack.decode(data, type=tuple[ApiKey, ...])
            except msgspec.MsgspecError:
                raise UsageError(
                    f"{KEYS_NAME} in the data folder is damaged, so no key is accepted",
                    "remove it, and make new keys with `peerloom keys new`",
                ) from None
            self._keys = {key.digest: key for key in kept}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, headers: Mapping[str, str]) -> ApiKey | None:
        """Return the key of a request, from the header that OpenAI's or Anthropic's clients use."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        text = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not text or len(text) > KEY_LENGTH_MAX:
            return None
        # Look the key up by its hash, so that the time reveals nothing about how much of a guessed key was
        # right.
        return self._keys.get(_digest(text))

    @property
    def handlers(self) -> Mapping[str, CommandHandler]:
        """The handlers for `node.control.ControlServer`."""
        return {
            "keys.new": command(NewKeyRequest, self._new),
            "keys.list": command(Nothing, self._list),
            "keys.revoke": command(RevokeKeyRequest, self._revoke),
        }

    async def _new(self, asked: NewKeyRequest, _emit: Emit) -> object:
        """Make a key. Its text is only in the answer."""
        if not asked.name.isprintable():
            raise UsageError("name: use printable characters")
        if len(self._keys) >= KEYS_MAX:
            raise UsageError(
                f"there are {KEYS_MAX} keys already", "revoke one; `peerloom keys list` shows them"
            )
        secret = urlsafe_b64encode(self._seams.entropy(KEY_BYTES)).rstrip(b"=").decode()
        text, made_at = PREFIX + secret, self._seams.clock.wall()
        digest = _digest(text)
        key = ApiKey(digest.hex()[:8], asked.name, digest, made_at, asked.in_flight)
        await self._keep(self._keys | {digest: key})
        return {"schema": "peerloom/key/1", "key": text} | _document(key)

    async def _list(self, _asked: Nothing, _emit: Emit) -> object:
        return {"schema": "peerloom/keys/1", "keys": [_document(key) for key in self._keys.values()]}

    async def _revoke(self, asked: RevokeKeyRequest, _emit: Emit) -> object:
        """Revoke a key by its id or name. Raises UsageError if there is none, or more than one."""
        found = [key for key in self._keys.values() if asked.key in (key.id, key.name)]
        if len(found) != 1:
            what = f"{len(found)} keys have the name {asked.key!r}. Give the id"
            raise UsageError(what if found else f"no key has the name {asked.key!r}", "`peerloom keys list`")
        await self._keep({digest: key for digest, key in self._keys.items() if key is not found[0]})
        return {"schema": "peerloom/key-revoked/1"} | _document(found[0])

    async def _keep(self, keys: dict[bytes, ApiKey]) -> None:
        data = msgspec.msgpack.encode(tuple(keys.values()))
        await self._seams.executor.run(lambda: self._seams.storage.write(KEYS_NAME, data))
        self._keys = keys


def _document(key: ApiKey) -> dict[str, Any]:
    return {"id": key.id, "name": key.name, "made_at": key.made_at, "in_flight_max": key.in_flight_max}


def _digest(text: str) -> bytes:
    return blake3(b"peerloom api key " + text.encode("utf-8", "replace")).digest()
