"""The state of each generation of a door (the node that asks a service): its tokens, and its present session
and route; and the messages, units and rows that follow from this state.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.codecs.base import Array
from partition.serve.events import GenerationWish, Sampled, Shape
from partition.serve.messages import (
    Answer,
    Carried,
    LeaveSession,
    OpenSession,
    Sends,
    SessionBase,
    UnitWork,
)
from partition.serve.prefixes import PREFIX_TOKENS_MIN, KeptPrefix, PrefixKey, common_length
from partition.serve.sampling import LogitRow, choose, read_hidden, read_row
from partition.serve.timeouts import OPEN_SECONDS_MAX, SILENCE_SECONDS_MAX

CHUNK_TOKENS = 128
"""Number of a prompt's tokens in one unit. Others must wait for one unit at a time while a long prompt is
read."""
UNITS_IN_FLIGHT_MAX = 4
"""Maximum number of chunks of one session in flight, so that several stages compute simultaneously."""


@dataclass(eq=False)
class RouteAttempt:
    """One session of a generation over one route."""

    session: bytes
    route: tuple[PeerId, ...]
    began_at: float
    bits: tuple[bytes, ...]
    reads: int
    """The number of tokens that the generation had when the attempt began."""
    base: bytes = b""
    """The session from which this session begins; empty if it begins by itself."""
    shared: int = 0
    """The number of initial tokens that this session takes over from the base."""
    opened: set[int] = field(default_factory=set)
    """The stages that have confirmed that they serve the session."""
    sent: int = 0
    units: int = 0
    computed: int = 0
    """The number of tokens in units that were answered."""
    flying: deque[UnitWork] = field(default_factory=deque)
    moved_at: float = inf
    """The time at which the present oldest unit in flight became the oldest."""
    row: LogitRow | None = None
    """A row that waits until its allowed tokens are set."""
    hidden: list[Array] = field(default_factory=list)
    """The hidden states that have arrived, if they are wanted."""

    @property
    def is_open(self) -> bool:
        return len(self.opened) == len(self.route)

    @property
    def known(self) -> int:
        """The number of tokens that every stage has computed."""
        return self.shared + self.computed


@dataclass(eq=False)
class OpenGeneration:
    """The state of a running generation."""

    number: int
    shape: Shape
    wish: GenerationWish
    tokens: list[int]
    waits_since: float
    attempt: RouteAttempt | None = None
    retry_at: float = -inf
    attempts: int = 0
    avoided: dict[PeerId, float] = field(default_factory=dict)
    """Peers that are not asked until the given time."""
    doubts: Counter[PeerId] = field(default_factory=Counter)
    """For each peer, the number of failed routes that it may have caused. Peers with fewer are preferred."""
    reason: str = ""
    """The reason why the latest route was lost."""
    missing_stage: int = -1
    missing: str = ""
    """The reason why the latest search found no route."""
    bits: tuple[bytes, ...] = ()
    """The bit class of each stage that computed the newest token."""
    follows: int = 0
    """The number of the generation that is reading tokens which this generation shares and waits for; 0 for
    none."""
    follows_tokens: int = 0
    """The number of tokens that both generations share."""
    allowed: Array | None = None
    """The allowed next tokens, as a boolean for each token of the vocabulary; None if not set yet."""

    @property
    def key(self) -> PrefixKey:
        return PrefixKey(self.shape.service, self.wish.owner)

    @property
    def is_full(self) -> bool:
        """Whether the generation has as many tokens as were requested, or as the context holds."""
        made = len(self.tokens) - len(self.wish.prompt)
        return made >= self.wish.tokens_max or len(self.tokens) >= self.shape.context


def openings(me: PeerId, generation: OpenGeneration, attempt: RouteAttempt, share: int) -> Sends:
    """Return the messages from the door `me` that open the session at the stages of its route."""
    begins = SessionBase(attempt.base, attempt.shared) if attempt.shared else None
    ways = (me, *attempt.route, me)
    service = generation.shape.service
    return [
        (peer, OpenSession(attempt.session, service, stage, ways[stage], ways[stage + 2], begins, share))
        for stage, peer in enumerate(attempt.route)
    ]


def cut_units(generation: OpenGeneration, attempt: RouteAttempt) -> list[Carried]:
    """Return unsent tokens as units, as far as the window allows."""
    units: list[Carried] = []
    tokens, wish = generation.tokens, generation.wish
    while attempt.is_open and attempt.sent < len(tokens) and len(attempt.flying) < UNITS_IN_FLIGHT_MAX:
        begin = attempt.sent
        attempt.sent = min(begin + (wish.unit_tokens or CHUNK_TOKENS), len(tokens))
        wanted = int(attempt.sent == len(tokens))
        if wish.is_hidden:
            wanted = attempt.sent - begin
        work = UnitWork(
            attempt.session,
            attempt.units,
            begin,
            attempt.sent - begin,
            wanted,
            wish.best if wanted else 0,
            stage=0,
            is_hidden=wish.is_hidden,
        )
        attempt.units += 1
        attempt.flying.append(work)
        ids = np.array(tokens[begin : attempt.sent], np.int64)
        units.append(Carried(work, (("int64", ids),)))
    return units


def read_answer(
    sender: PeerId, generation: OpenGeneration, attempt: RouteAttempt, carried: Carried
) -> LogitRow | None:
    """Return the row of logits, if one was requested. Hidden states are appended to those that have arrived.
    Raises RemoteProtocolError if this is not a valid answer to the oldest unit in flight."""
    answer = carried.message
    assert isinstance(answer, Answer)
    if sender != attempt.route[-1] or not attempt.flying or attempt.flying[0].number != answer.number:
        raise RemoteProtocolError("an answer is not for the oldest unit in flight")
    if generation.wish.is_hidden:
        rows = read_hidden(attempt.flying[0], answer, carried.arrays, generation.shape.vocabulary)
        attempt.hidden.append(rows)
        return None
    return read_row(attempt.flying[0], answer, carried.arrays, generation.shape.vocabulary)


def take_token(generation: OpenGeneration, attempt: RouteAttempt) -> Sampled | None:
    """Choose the next token from the row that arrived, and append it. Return None, without appending, if it
    is a stop token."""
    assert attempt.row is not None
    row, wish, position = attempt.row, generation.wish, len(generation.tokens)
    answer_tokens = [] if wish.sampling.is_plain else generation.tokens[len(wish.prompt) :]
    allowed = generation.allowed
    token = choose(row, wish.sampling, position, answer_tokens, prompt=wish.prompt, allowed=allowed)
    attempt.row = generation.allowed = None
    if token in wish.stops:
        return None
    generation.tokens.append(token)
    generation.bits = attempt.bits
    top = row.likeliest(wish.sampling.top)
    return Sampled(generation.number, position, token, row.logprob(token), top)


def silent_peers(
    now: float, generations: Iterable[OpenGeneration], heard_at: Mapping[PeerId, float]
) -> list[tuple[PeerId, str]]:
    """Return the providers to give up because of their silence, with reasons."""
    found: dict[PeerId, str] = {}
    for each in generations:
        attempt = each.attempt
        for stage, peer in enumerate(attempt.route) if attempt is not None else ():
            assert attempt is not None
            if stage not in attempt.opened and now - attempt.began_at >= OPEN_SECONDS_MAX:
                found[peer] = "it did not answer"
            elif stage in attempt.opened and now - heard_at.get(peer, now) >= SILENCE_SECONDS_MAX:
                found[peer] = "its node is silent"
    return list(found.items())


def find_leader(
    generations: Iterable[OpenGeneration],
    follower: OpenGeneration,
    tokens_min: int,
    may_share: Callable[[Collection[PeerId]], bool],
) -> tuple[int, int] | None:
    """Return the number of a generation that is still reading enough of the follower's tokens, and the number
    of shared tokens; None if there is none. `may_share` returns whether sessions on a route can share."""
    wanted = follower.tokens[:-1]
    for each in generations:
        attempt = each.attempt
        if attempt is None or attempt.known >= attempt.reads or each.key != follower.key:
            continue
        common = common_length(each.tokens[: attempt.reads], wanted)
        if common >= tokens_min and attempt.known < common and may_share(attempt.route):
            return each.number, common
    return None


def follows_another(
    now: float,
    follower: OpenGeneration,
    generations: Iterable[OpenGeneration],
    shared: int,
    may_share: Callable[[Collection[PeerId]], bool],
) -> bool:
    """Return whether another generation is reading many more of the follower's tokens than the `shared` ones
    that are read already. In that case the follower waits for those tokens, and then begins from that
    generation."""
    follower.follows = 0
    if follower.wish.is_vector or follower.wish.is_hidden:
        return False
    found = find_leader(generations, follower, shared + PREFIX_TOKENS_MIN, may_share)
    if found is None:
        return False
    follower.follows, follower.follows_tokens = found
    follower.waits_since = now
    return True


def let_go(gone: Sequence[KeptPrefix], besides: PeerId | None = None) -> Sends:
    """Return the messages by which all stages forget resting sessions, except those to the peer `besides`."""
    return [
        (peer, LeaveSession(each.session))
        for each in gone
        for peer in dict.fromkeys(each.route)
        if peer != besides
    ]


class OwnerShares:
    """The numbers by which providers distinguish the sessions of a door's different owners."""

    def __init__(self) -> None:
        self._shares: dict[str, int] = {}
        """The number of each owner that has a generation in progress."""

    def share_of(self, owner: str, generations: Iterable[OpenGeneration]) -> int:
        """Return the number of an owner. Numbers of owners without a generation become free."""
        owners = {each.wish.owner for each in generations}
        self._shares = {name: number for name, number in self._shares.items() if name in owners}
        taken = set(self._shares.values())
        return self._shares.setdefault(owner, next(n for n in range(len(taken) + 1) if n not in taken))
