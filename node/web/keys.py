"""Keys for the HTTP forms: made once, shown once, kept as hashes in the data folder.

A key is 32 random bytes, so a plain hash is as good as a slow one. A key only lets a program ask models; the
page's token lets its owner act on the node.
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
"""The name of the blob that keeps them."""
KEYS_MAX = 256
KEY_BYTES = 32
KEY_LENGTH_MAX = 128
"""Longer texts are not our keys, and are not hashed."""
NAME_LENGTH_MAX = 64
PREFIX = "pl-"


class ApiKey(msgspec.Struct, frozen=True):
    """One key: its hash, and what may be done with it."""

    id: str
    name: str
    digest: bytes
    made_at: float
    in_flight_max: Annotated[int, msgspec.Meta(ge=1, le=IN_FLIGHT_MAX)] = IN_FLIGHT_USUAL


class NewKeyRequest(msgspec.Struct, frozen=True):
    """Make a key with a limit of concurrent requests."""

    name: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)] = ""
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=IN_FLIGHT_MAX)] = IN_FLIGHT_USUAL


class RevokeKeyRequest(msgspec.Struct, frozen=True):
    """Forget the key with this id or name."""

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
                    f"{KEYS_NAME} in the data folder is damaged: no key is known",
                    "remove it, and make new keys: `peerloom keys new`",
                ) from None
            self._keys = {key.digest: key for key in kept}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, headers: Mapping[str, str]) -> ApiKey | None:
        """Return the key of a request, from the header of OpenAI's or Anthropic's clients."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        text = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not text or len(text) > KEY_LENGTH_MAX:
            return None
        # A lookup by hash: its time reveals nothing about how much of a key was right.
        return self._keys.get(_digest(text))

    @property
    def handlers(self) -> Mapping[str, CommandHandler]:
        """For `node.control.ControlServer`."""
        return {
            "keys.new": command(NewKeyRequest, self._new),
            "keys.list": command(Nothing, self._list),
            "keys.revoke": command(RevokeKeyRequest, self._revoke),
        }

    async def _new(self, asked: NewKeyRequest, _emit: Emit) -> object:
        """Make a key. Only the answer has its text."""
        if not asked.name.isprintable():
            raise UsageError("name: want printable letters")
        if len(self._keys) >= KEYS_MAX:
            raise UsageError(f"{KEYS_MAX} keys are made already", "revoke one: `peerloom keys list`")
        secret = urlsafe_b64encode(self._seams.entropy(KEY_BYTES)).rstrip(b"=").decode()
        text, made_at = PREFIX + secret, self._seams.clock.wall()
        digest = _digest(text)
        key = ApiKey(digest.hex()[:8], asked.name, digest, made_at, asked.in_flight)
        await self._keep(self._keys | {digest: key})
        return {"schema": "peerloom/key/1", "key": text} | _document(key)

    async def _list(self, _asked: Nothing, _emit: Emit) -> object:
        return {"schema": "peerloom/keys/1", "keys": [_document(key) for key in self._keys.values()]}

    async def _revoke(self, asked: RevokeKeyRequest, _emit: Emit) -> object:
        """Forget a key, by its id or its name. Raises UsageError: there is none, or several."""
        found = [key for key in self._keys.values() if asked.key in (key.id, key.name)]
        if len(found) != 1:
            what = f"{len(found)} keys are called {asked.key!r}; give the id"
            raise UsageError(what if found else f"no key is called {asked.key!r}", "`peerloom keys list`")
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
