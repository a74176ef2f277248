"""The group of one averaging attempt: its members, what they average, and which member reduces which part.

Every member of an attempt holds the same `Group`, byte for byte. Its hash names the attempt, so peers that
disagree about anything in it never mix their values. A peer draws a new nonce for each attempt that it joins.
A restarted process has lost its nonce, so it can never take part in the interrupted attempt again.

Not here: the agreement on a group (`gossip.matchmaking`), and the choice of its members
(`gossip.averaging.grid`).
"""

from math import isfinite
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from crypto.encoding import encode
from crypto.identity import PEER_ID_BYTES, PeerId
from gossip.claims import Count

GROUP_MEMBERS_MAX = 64
"""Maximum number of members of a group. All members exchange data with all others, so beyond this size,
smaller groups over more rounds cost less (Moshpit)."""
NAME_BYTES_MAX = 64
NONCE_BYTES = 16
HASH_BYTES = 32
ITEMS_MAX = 1 << 34
"""Maximum number of values in one vector: 64 GiB of float32, far beyond realistic use."""
CODEC_LENGTH_MAX = 64
RATE_MAX = 1 << 40
"""Maximum valid rate, in bytes per second: a claim beyond a terabyte cannot be a measurement."""
RATE_UNKNOWN = 1
"""The rate that a peer claims before it has measured its bandwidth; it counts as the median."""
GRANULE_ITEMS = 4_096
"""Parts begin at multiples of this number of values, so that no block of a codec spans two parts."""
WEIGHT_MIN, WEIGHT_MAX = 1e-12, 1e12
"""Bounds of valid weights. Products with weights outside them may overflow or vanish."""

Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Mode = Literal["butterfly", "exchange"]
"""`butterfly`: each reducing member sums one part and sends the mean to all. `exchange`: every member
receives every payload and sums all of it. This suits sparse payloads, because their sum is not sparse."""


Aggregate = Literal[
    "mean",
    "median",
    "trimmed-mean",
    "centered-clipping",
    "geometric-median",
    "krum",
    "multi-krum",
    "nnm-median",
    "nnm-trimmed-mean",
    "nnm-centered-clipping",
    "nnm-geometric-median",
    "nnm-krum",
    "nnm-multi-krum",
]
"""The rule by which a part is reduced; see `gossip.averaging.aggregates`."""


class GroupMember(msgspec.Struct, frozen=True, array_like=True):
    """One peer in one attempt.

    `rate` is the peer's measured upload in bytes per second, or RATE_UNKNOWN before the first measurement. It
    is 0 for a peer that only sends and reduces nothing, because it is behind a NAT or has little upload. A
    member without tensors is a helper: it only reduces. `coordinate` is the peer's coordinate on the round's
    axis (`gossip.averaging.grid`), which the others need afterwards.
    """

    peer: Subject
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    rate: Annotated[int, msgspec.Meta(ge=0, le=RATE_MAX)]
    has_tensors: bool = True
    coordinate: Annotated[int, msgspec.Meta(ge=0, lt=GROUP_MEMBERS_MAX)] = 0


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """The tensors to average, and how to average them. `signature` is the hash of the tensors' names, shapes
    and types (`gossip.averaging.tensors`); `items` and `dtype` describe the vector."""

    mode: Mode
    codec: Annotated[str, msgspec.Meta(max_length=CODEC_LENGTH_MAX)]
    signature: Hash
    items: Annotated[int, msgspec.Meta(ge=1, le=ITEMS_MAX)]
    dtype: Literal["float32", "float64"]
    aggregate: Aggregate = "mean"


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Everything that the members of one attempt must agree on.

    `name` is chosen by the caller: a run, or one of its stages. `round` counts up; `number` counts the
    attempts of one round.
    """

    name: Annotated[bytes, msgspec.Meta(max_length=NAME_BYTES_MAX)]
    round: Count
    number: Count
    terms: Terms
    members: Annotated[tuple[GroupMember, ...], msgspec.Meta(min_length=1, max_length=GROUP_MEMBERS_MAX)]

    @property
    def id(self) -> bytes:
        """The attempt's name: a hash of all fields."""
        return blake3(encode(self)).digest()

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(PeerId(member.peer) for member in self.members)


class Owner(msgspec.Struct, frozen=True):
    """The member at `place` reduces the items from `begin` to `end`."""

    place: int
    begin: int
    end: int


def fault_of(group: Group) -> str | None:
    """Return why an attempt in this group is impossible; None if it is possible."""
    peers = group.peers
    if len(set(peers)) != len(peers):
        return "a peer occurs twice in the group"
    if sum(member.has_tensors for member in group.members) < 2:
        return "fewer than two members have tensors"
    if group.terms.mode == "butterfly" and not any(member.rate for member in group.members):
        return "no member reduces"
    if group.terms.mode == "exchange" and group.terms.aggregate != "mean":
        return f"{group.terms.aggregate} compares whole vectors, but an exchange sends sparse ones"
    return None


def is_weight(weight: float) -> bool:
    """Return whether a number is a valid weight."""
    return isfinite(weight) and WEIGHT_MIN <= weight <= WEIGHT_MAX


def owners_of(group: Group) -> tuple[Owner, ...]:
    """Return which member reduces which items, in the order of members. Members that reduce nothing are left
    out."""
    if group.terms.mode == "exchange":
        return tuple(Owner(place, 0, group.terms.items) for place in range(len(group.members)))
    ends = _cumulated(_fractions(group), group.terms.items)
    return tuple(
        Owner(place, begin, end)
        for place, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        if begin < end
    )


def _cumulated(fractions: list[float], items: int) -> list[int]:
    """Return the end of each part, at multiples of a granule. The last part that is not empty ends with the
    vector."""
    ends: list[int] = []
    total = 0.0
    for fraction in fractions:
        total += fraction
        end = min(round(total * items / GRANULE_ITEMS) * GRANULE_ITEMS, items)
        ends.append(end if fraction > 0 else (ends[-1] if ends else 0))
    last = max(place for place, fraction in enumerate(fractions) if fraction > 0)
    return [*ends[:last], *[items] * (len(ends) - last)]


def _fractions(group: Group) -> list[float]:
    """Return each member's share of the vector, chosen so that all members finish at the same time.

    A member that owns the fraction f uploads (1 - f) of its own vector, and f to each of the others. The
    largest upload time is minimal at the time T at which the fractions f(T) of all members add up to one. The
    arithmetic is plain IEEE in a fixed order, so all members get the same bits (after hivemind's load
    balancing, Ryabinin et al. 2021).
    """
    others = len(group.members) - 1
    known = sorted(member.rate for member in group.members if member.rate > RATE_UNKNOWN)
    usual = known[(len(known) - 1) // 2] if known else RATE_UNKNOWN
    rates = [usual if member.rate == RATE_UNKNOWN else member.rate for member in group.members]
    rows = [(rate, int(member.has_tensors)) for rate, member in zip(rates, group.members, strict=True)]
    if others <= 1 or all(rate in (0, rows[0][0]) for rate, _ in rows):
        reducing = sum(rate > 0 for rate, _ in rows)
        return [1 / reducing if rate else 0.0 for rate, _ in rows]

    def parts(seconds: float) -> list[float]:
        return [
            min(max((seconds * rate - sends) / (others - sends), 0.0), 1.0) if rate else 0.0
            for rate, sends in rows
        ]

    low, high = 0.0, (others + 1) / min(rate for rate, _ in rows if rate)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(parts(middle)) >= 1 else (middle, high)
    found = parts(high)
    total = sum(found)
    return [fraction / total for fraction in found]
