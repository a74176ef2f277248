"""The messages by which peers that want to average now agree on a group (`gossip.matchmaking`)."""

from typing import Annotated

import msgspec

from gossip.averaging.group import GROUP_MEMBERS_MAX, NONCE_BYTES, RATE_MAX, Group

KEY_BYTES = 32
Hash = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The sender wants a group under this key. `rate`, `has_tensors` and `coordinate` as in
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
    """The sender is in another group, or wants none: leave it out of this attempt."""

    key: Hash
    attempt: Hash


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The sender is in a group under this key without the receiver. In a numbered round there is no other."""

    key: Hash


Message = Ready | Propose | Decline | Closed
