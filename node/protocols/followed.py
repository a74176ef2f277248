"""Settings that many nodes take from one key: numbered, signed and bounded, as data.

They are a `SettingsBody` in a Fact signed by the key. A node that follows the key applies the newest settings
that it finds, restricted to those that its owner lets others set. Not here: how settings are found and
applied (`node.following`).
"""

import base64
import binascii
from typing import Annotated

import msgspec

from crypto.contact import NAME_LENGTH_MAX
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId, parse_peer, peer_text

SETTINGS_PURPOSE = "settings"
SETTINGS_MAX = 32
"""Maximum number of settings in one document; fewer can be set from outside."""
VALUE_LENGTH_MAX = 4_096
"""Maximum length of a value. The longest is a list of some seventy peers."""
SETTINGS_BYTES_MAX = 16 * 1024
"""Maximum size of a document. Longer ones are not fetched."""
VERSION_MAX = 2**53

Version = Annotated[int, msgspec.Meta(ge=1, lt=VERSION_MAX)]


class SharedSetting(msgspec.Struct, frozen=True, array_like=True):
    """A setting, named as in `peerloom config set`, and its value as a person writes it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    value: Annotated[str, msgspec.Meta(max_length=VALUE_LENGTH_MAX)]


class SettingsBody(msgspec.Struct, frozen=True, array_like=True):
    """All settings of one key. A setting that a later version of the document omits returns to the node
    owner's value."""

    version: Version
    name: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
    settings: Annotated[tuple[SharedSetting, ...], msgspec.Meta(max_length=SETTINGS_MAX)]

    def __post_init__(self) -> None:
        if len({each.name for each in self.settings}) != len(self.settings):
            raise ValueError("one setting twice")


class SettingsFile(msgspec.Struct, frozen=True):
    """A signed document as a file: JSON that can be sent by any means."""

    schema: Annotated[str, msgspec.Meta(pattern=r"^peerloom/settings/1\Z")]
    key: Annotated[str, msgspec.Meta(max_length=128)]
    version: Version
    body: Annotated[str, msgspec.Meta(max_length=2 * SETTINGS_BYTES_MAX)]
    signature: Annotated[str, msgspec.Meta(max_length=128)]


def sign_settings(signer: Signer, body: SettingsBody) -> Fact:
    """Return the settings signed for the signer's swarm."""
    return signer.sign(SETTINGS_PURPOSE, encode(body))


def read_settings(signer: Signer, fact: Fact) -> SettingsBody:
    """Return the settings in a fact. Raises RemoteProtocolError if its author did not sign it for this
    swarm."""
    body: SettingsBody = decode(fact.body, SettingsBody, bytes_max=SETTINGS_BYTES_MAX)
    signer.check(SETTINGS_PURPOSE, fact)
    return body


def file_of(fact: Fact, version: int) -> bytes:
    """Return the text of a file for a signed document."""
    file = SettingsFile(
        "peerloom/settings/1",
        peer_text(PeerId(fact.author)),
        version,
        base64.b64encode(fact.body).decode(),
        base64.b64encode(fact.signature).decode(),
    )
    return msgspec.json.format(msgspec.json.encode(file)) + b"\n"


def fact_of(text: str) -> Fact:
    """Return the fact in such a file, unverified. Raises ValueError."""
    try:
        file = msgspec.json.decode(text, type=SettingsFile)
        body, signature = (base64.b64decode(each, validate=True) for each in (file.body, file.signature))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, binascii.Error):
        raise ValueError("not signed settings") from None
    return Fact(parse_peer(file.key), body, signature)


def fact_in(data: bytes, author: PeerId) -> Fact | None:
    """Return the fact in stored data; None if it is not a fact of this author."""
    try:
        fact: Fact = decode(data, Fact, bytes_max=SETTINGS_BYTES_MAX)
    except RemoteProtocolError:
        return None
    return fact if fact.author == author else None
