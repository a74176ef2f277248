"""The messages by which peers that want to average now agree on a group (`gossip.matchmaking`)."""

from typing import Annotated

import msgspec

from gossip.averaging.group import GROUP_MEMBERS_MAX, NONCE_BYTES, RATE_MAX, Group

KEY_BYTES = 32
Hash = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The sender wants a group under this key. `rate`, `has_tensors` and `coordinate` are those of
    `group.GroupMember`."""

    key: Hash
    nonce: Nonce
    rate: Annotated[int, msgspec.Meta(ge=0, le=RATE_MAX)]
    has_tensors: bool = True
    coordinate: Annotated[int, msgspec.Meta(ge=0, lt=GROUP_MEMBERS_MAX)] = 0


class Propose(msgspec.Struct, frozen=True, array_like=True, tag="propose"):
    """The sender proposes this group."""

    key: Hash
    group: Group


class Decline(msgspec.Struct, frozen=True, array_like=True, tag="decline"):
    """The sender is in a different group, or wants none. Leave it out of this attempt."""

    key: Hash
    attempt: Hash


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The sender is in a group under this key, without the receiver. A numbered round has only one group."""

    key: Hash


Message = Ready | Propose | Decline | Closed
