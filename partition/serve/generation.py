"""The state of each generation of a door: its tokens, and the session and route that it has now; with the
messages, units and rows that follow from it.
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
"""Tokens of a prompt in one unit: others wait this long while a long prompt is read."""
UNITS_IN_FLIGHT_MAX = 4
"""Chunks of one session on their way, so that several stages compute at once."""


@dataclass(eq=False)
class RouteAttempt:
    """One session of a generation, over one route."""

    session: bytes
    route: tuple[PeerId, ...]
    began_at: float
    bits: tuple[bytes, ...]
    reads: int
    """The number of tokens when it began."""
    base: bytes = b""
    """The session that it begins from."""
    shared: int = 0
    """Tokens that it has from there."""
    opened: set[int] = field(default_factory=set)
    """Stages that have confirmed that they serve it."""
    sent: int = 0
    units: int = 0
    computed: int = 0
    """Tokens of units that were answered."""
    flying: deque[UnitWork] = field(default_factory=deque)
    moved_at: float = inf
    """Since when the oldest unit in flight has been the oldest."""
    row: LogitRow | None = None
    """A row that waits for its allowed tokens."""
    hidden: list[Array] = field(default_factory=list)
    """The hidden states that came, where they are wanted."""

    @property
    def is_open(self) -> bool:
        return len(self.opened) == len(self.route)

    @property
    def known(self) -> int:
        """How many of its tokens every stage has computed."""
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
    """Peers that are not asked until then."""
    doubts: Counter[PeerId] = field(default_factory=Counter)
    """By peer, the failed routes that it may have caused; others are asked first."""
    reason: str = ""
    """Why the last route was lost."""
    missing_stage: int = -1
    missing: str = ""
    """The stage without a provider in the last search for a route."""
    bits: tuple[bytes, ...] = ()
    """The bit class of each stage that the newest token came from."""
    follows: int = 0
    """The generation that reads this one's first tokens, for which this one waits."""
    follows_tokens: int = 0
    """How many tokens they share."""
    allowed: Array | None = None
    """The allowed next tokens, a boolean each; None if not set yet."""

    @property
    def key(self) -> PrefixKey:
        return PrefixKey(self.shape.service, self.wish.owner)

    @property
    def is_full(self) -> bool:
        """Whether it has as many tokens as were wished, or as the context holds."""
        made = len(self.tokens) - len(self.wish.prompt)
        return made >= self.wish.tokens_max or len(self.tokens) >= self.shape.context


def openings(me: PeerId, generation: OpenGeneration, attempt: RouteAttempt, share: int) -> Sends:
    """Return the messages that open its session at the stages of a route for the door `me`."""
    begins = SessionBase(attempt.base, attempt.shared) if attempt.shared else None
    ways = (me, *attempt.route, me)
    service = generation.shape.service
    return [
        (peer, OpenSession(attempt.session, service, stage, ways[stage], ways[stage + 2], begins, share))
        for stage, peer in enumerate(attempt.route)
    ]


def cut_units(generation: OpenGeneration, attempt: RouteAttempt) -> list[Carried]:
    """Return unsent tokens as units, within the window."""
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
    """Return the row that is wanted, if one is; hidden states are put to the others. Raises
    RemoteProtocolError: it is not the answer to the oldest unit in flight."""
    answer = carried.message
    assert isinstance(answer, Answer)
    if sender != attempt.route[-1] or not attempt.flying or attempt.flying[0].number != answer.number:
        raise RemoteProtocolError("an answer to a unit that is not the next")
    if generation.wish.is_hidden:
        rows = read_hidden(attempt.flying[0], answer, carried.arrays, generation.shape.vocabulary)
        attempt.hidden.append(rows)
        return None
    return read_row(attempt.flying[0], answer, carried.arrays, generation.shape.vocabulary)


def take_token(generation: OpenGeneration, attempt: RouteAttempt) -> Sampled | None:
    """Choose and append the next token, from the row that came; None: it is a stop, and is not appended."""
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
    """Return the providers that are given up for their silence, and why."""
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
    """Return the number of a generation that still reads enough of the follower's tokens, and the number of
    shared tokens; None: there is none. `may_share` returns whether a route's sessions share."""
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
    """Return whether another generation reads many more of the follower's tokens than the `shared` ones that
    are read already; then the follower begins from it, and waits until it has."""
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
    """Return the messages by which all stages forget resting sessions, `besides` one peer's."""
    return [
        (peer, LeaveSession(each.session))
        for each in gone
        for peer in dict.fromkeys(each.route)
        if peer != besides
    ]


class OwnerShares:
    """The numbers by which providers tell the sessions of a door's owners apart."""

    def __init__(self) -> None:
        self._shares: dict[str, int] = {}
        """The number of each owner whose generations are not over."""

    def share_of(self, owner: str, generations: Iterable[OpenGeneration]) -> int:
        """Return the number of an owner; owners without a generation free theirs."""
        owners = {each.wish.owner for each in generations}
        self._shares = {name: number for name, number in self._shares.items() if name in owners}
        taken = set(self._shares.values())
        return self._shares.setdefault(owner, next(n for n in range(len(taken) + 1) if n not in taken))
