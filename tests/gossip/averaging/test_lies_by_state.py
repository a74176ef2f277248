"""For each state of an averaging attempt, every plausible lie in that state is tried, in virtual time.

The liar is one of five members and runs the real core. Its messages are changed on their way, either to all
other members or to one of them. `STATES` is complete: a message without a row fails the test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.identity import PeerId
from gossip.averaging.codecs import view_of
from gossip.averaging.group import Group, owners_of
from gossip.averaging.messages import (
    COMMITMENT_PURPOSE,
    HAVE_PURPOSE,
    SEAL_PURPOSE,
    Arrived,
    AttemptMessage,
    Chunk,
    ChunkRequest,
    Commitment,
    CommitmentBody,
    Have,
    HaveBody,
    Holding,
    Seal,
    SealBody,
    Withdraw,
)
from gossip.averaging.outcome import Averaged, NotAveraged
from tests.gossip.averaging.network import Averaging, group_of, members_of, vectors_of
from tests.gossip.swarm import HashSigner, peer_of

COUNT, ITEMS, LIAR = 5, 5 * 4_096, 0
SECONDS_MAX = 60.0
FAR = 3.0
"""The allowed distance of a result from the honest mean, as a multiple of the distance of the farthest honest
vector."""
CANCELLED_SECONDS = 0.015
FACTORS = (0.0, -1.0, 3.0, 1e3, 1e30)
WEIGHTS = (1e-9, 16.0, 1e6, 1e12)

Lie = Callable[[Any], Any]
"""Returns the false message to send instead; None to send nothing."""


def signed(purpose: str, kind: Any, change: Callable[[Any], Any]) -> Lie:
    def lie(message: Any) -> Any:
        if message.fact.author != peer_of(LIAR):
            return message  # facts of others are only forwarded: the liar cannot sign for them
        body = change(decode(message.fact.body, kind, bytes_max=10_000))
        return type(message)(message.attempt, HashSigner(peer_of(LIAR)).sign(purpose, encode(body)))

    return lie


def commits(change: Callable[[CommitmentBody], CommitmentBody]) -> Lie:
    return signed(COMMITMENT_PURPOSE, CommitmentBody, change)


def has(change: Callable[[HaveBody], HaveBody]) -> Lie:
    return signed(HAVE_PURPOSE, HaveBody, change)


def seals(change: Callable[[SealBody], SealBody]) -> Lie:
    return signed(SEAL_PURPOSE, SealBody, change)


def other_numbers(factor: float) -> Lie:
    def lie(chunk: Chunk) -> Chunk:
        numbers = np.frombuffer(chunk.data, np.float32) * np.float32(factor)
        return msgspec.structs.replace(
            chunk, data=view_of(numbers), checksum=blake3(view_of(numbers)).digest()
        )

    return lie


def put(**fields: Any) -> Lie:
    return lambda message: msgspec.structs.replace(message, **fields)


def held_by(**fields: Any) -> Lie:
    return lambda body: put(held=tuple(put(**fields)(each) for each in body.held))(body)


def weighs(weight: float) -> Lie:
    return commits(put(weight=weight))


NOTHING: Lie = lambda _message: None  # noqa: E731 - one of a table
STATES: dict[str, tuple[type, Callable[[Any], bool], dict[str, Lie]]] = {
    "scatters": (
        Chunk,
        lambda chunk: chunk.phase == "scatter",
        {f"times {factor}": other_numbers(factor) for factor in FACTORS}
        | {
            "another's part": put(place=1),
            "as reduced": put(phase="gather"),
            "a later number": put(number=1),
        },
    ),
    "commits": (
        Commitment,
        lambda _: True,
        {f"weight {weight}": weighs(weight) for weight in WEIGHTS}
        | {
            "other roots": commits(lambda body: put(roots=body.roots[::-1])(body)),
            "too few roots": commits(lambda body: put(roots=body.roots[:-1])(body)),
            "of another attempt": commits(put(attempt=bytes(32))),
        },
    ),
    "has": (
        Have,
        lambda _: True,
        {
            "one fewer": has(lambda body: put(held=body.held[:-1])(body)),
            "only itself": has(lambda body: put(held=body.held[:1])(body)),
            "nobody": has(put(held=())),
            "another commitment": has(held_by(commitment=bytes(32))),
            "another weight": has(held_by(weight=1e6)),
        },
    ),
    "gathers": (
        Chunk,
        lambda chunk: chunk.phase == "gather",
        {f"times {factor}": other_numbers(factor) for factor in FACTORS}
        | {"another commit": put(commit=bytes(32)), "another's part": put(place=1)},
    ),
    "seals": (
        Seal,
        lambda _: True,
        {"another root": seals(put(root=bytes(32))), "another commit": seals(put(commit=bytes(32)))},
    ),
    "holds": (Holding, lambda _: True, {"another digest": put(digest=bytes(32))}),
    "asks": (
        ChunkRequest,
        lambda _: True,
        {"for all": put(chunks=tuple(range(64))), "of another": put(place=1)},
    ),
    "withdraws": (Withdraw, lambda _: True, {"from another attempt": put(attempt=bytes(32))}),
    "says what arrived": (
        Arrived,
        lambda _: True,
        {"too much": put(size_bytes=2**52), "at once": put(microseconds=0), "late": put(microseconds=2**52)},
    ),
}  # fmt: skip
CASES = [
    pytest.param(state, lie, to_all, id=f"{state}, {lie}, to {'all' if to_all else 'one'}")
    for state, (_, _, lies) in STATES.items()
    for lie in [*lies, "nothing", "nothing from then on"]
    for to_all in (True, False)
]


@dataclass
class Liar:
    """Changes the liar's messages in one state, between the liar and the others."""

    state: str
    lie: str
    to_all: bool
    is_silent: bool = False
    told: int = 0
    one: int | None = None
    """If only one member is lied to: the first member that would receive such a message."""

    def says(self, receiver: int, message: Any) -> Any:
        kind, fits, lies = STATES[self.state]
        if not self.to_all and self.one not in (None, receiver):
            return message
        if self.is_silent:
            return None
        if not (isinstance(message, kind) and fits(message)):
            return message
        self.one = receiver
        self.told += 1
        self.is_silent = self.lie == "nothing from then on"
        return lies.get(self.lie, NOTHING)(message)


class World(Averaging):
    """Run an attempt in which one member lies. For the states in which a member asks for a part, a part to
    the liar is lost, so that the liar asks for it. For the states in which a member withdraws, or requests
    something and stays silent, the liar is cancelled in the middle.
    """

    def __init__(self, group: Group, vectors: Any, liar: Liar) -> None:
        super().__init__(group, vectors)
        self.liar = liar
        self._is_lost = liar.state != "asks"
        if liar.state == "withdraws":
            self.hooks.append(self._cancel)

    def _cancel(self) -> None:
        if self.now >= CANCELLED_SECONDS and self.attempts[LIAR].result is None:
            self.send(LIAR, self.attempts[LIAR].cancel(self.now))

    def send(self, sender: int, sends: Any) -> None:
        if sender == LIAR:
            said = [(peer, self.liar.says(self.numbers[peer], message)) for peer, message in sends]
            sends = [(peer, message) for peer, message in said if message is not None]
        elif not self._is_lost and any(self._is_part_for_it(*each) for each in sends):
            self._is_lost, sends = True, [each for each in sends if not self._is_part_for_it(*each)]
        super().send(sender, sends)

    @staticmethod
    def _is_part_for_it(peer: PeerId, message: Any) -> bool:
        return peer == peer_of(LIAR) and isinstance(message, Chunk) and message.phase == "gather"


def group_by_the_default() -> Group:
    group = group_of(members_of(COUNT), ITEMS)
    terms = msgspec.structs.replace(group.terms, aggregate="nnm-trimmed-mean")
    return msgspec.structs.replace(group, terms=terms)


def test_the_table_has_lies_for_every_message_of_an_attempt() -> None:
    assert {kind for kind, _, _ in STATES.values()} == set(get_args(AttemptMessage))


@pytest.mark.parametrize(("state", "lie", "to_all"), CASES)
def test_after_a_lie_in_any_state_all_honest_members_agree(state: str, lie: str, to_all: bool) -> None:
    world = World(group_by_the_default(), vectors_of(range(COUNT), ITEMS), Liar(state, lie, to_all))
    check(world)
    assert world.liar.told


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_member_that_lies_consistently_cannot_move_the_result(factor: float, weight: float) -> None:
    """The liar takes part with different values, but in every state it claims the same values to all."""
    vectors = vectors_of(range(COUNT), ITEMS)
    world = Averaging(
        group_by_the_default(), vectors | {LIAR: vectors[LIAR] * np.float32(factor)}, {LIAR: weight}
    )
    check(world)
    assert len(world.successes) == COUNT


def check(world: Averaging) -> None:
    group, vectors = world.group, vectors_of(range(COUNT), ITEMS)
    world.start()
    world.run(SECONDS_MAX)
    honest = [result for number, result in world.results.items() if number != LIAR]
    assert None not in honest, "the attempt ends"
    found = [result for result in honest if isinstance(result, Averaged)]
    assert len({(each.digest, each.vector.tobytes()) for each in found}) <= 1
    truth = np.stack([vectors[number] for number in range(COUNT) if number != LIAR])
    centre = truth.mean(axis=0)
    others = np.ones(ITEMS, bool)  # nothing is guaranteed about the liar's own part
    for owner in owners_of(group):
        others[owner.begin : owner.end] &= owner.place != LIAR
    farthest = np.linalg.norm((truth - centre)[:, others], axis=1).max()
    for each in found:
        assert np.linalg.norm((each.vector - centre)[others]) < FAR * farthest
    failed = [each for each in honest if isinstance(each, NotAveraged)]
    suspects = {peer for each in failed for peer in each.suspects}
    assert suspects == ({peer_of(LIAR)} if failed else set()), (
        "an honest member is blamed instead of the liar"
    )
