"""Chooses a session's route over a service's replicas: the one with the least remaining time for the whole
answer.

Each stage reads all tokens in chunks, and then computes one token after another; each token crosses every
link of the route and comes back to the door. So reading and decoding are priced separately: a long prompt
weighs the one, a long answer the other. Each session slows a replica. An unmeasured replica counts as the
quickest of its kind, so a new stage is tried without getting everything. Not here: the measurements
(`node.serving`), and leaving a route (`partition.serve.door`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from crypto.identity import PeerId

LOAD_SECONDS = 0.005
"""The cost of each session at a provider for a token, beside what was measured."""
SMOOTHING = 0.2
"""The part of the newest measurement in a mean."""
DECODED_TOKENS_MAX = 4
"""A call with so many tokens of one session at most is decoding: one token, or some that are verified."""
READ_TOKENS_MIN = 64
"""One with so many at least is reading; what lies between says little about either."""
SECONDS_MAX = 60.0
"""A longer call was that of a machine which was asleep."""

Way = tuple[int, float, tuple[PeerId, ...]]
"""Doubts, seconds, and the peers from the first stage on."""


@dataclass(frozen=True)
class StageReplica:
    """A provider that answers for a stage.

    `seconds` is a round trip between it and the door, `decode_seconds` what it takes for a token and
    `read_seconds` for a token of a prompt; `links` how long a message takes from it to others. 0, or nothing:
    not measured. `bits` is the bit class that it says it has (`partition.execute.bit_class`), empty for none.
    """

    peer: PeerId
    sessions: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    read_seconds: float = 0.0
    links: Mapping[PeerId, float] = field(default_factory=dict)
    bits: bytes = b""


@dataclass
class StagePace:
    """A stage's times by its answered calls; 0 if there was none of the kind."""

    decode_seconds: float = 0.0
    read_seconds: float = 0.0

    def note(self, tokens: Sequence[int], seconds: float) -> None:
        """Note a call and the tokens of its units."""
        if not tokens or not 0 <= seconds <= SECONDS_MAX:
            return
        if max(tokens) <= DECODED_TOKENS_MAX:
            self.decode_seconds = _mixed(self.decode_seconds, seconds)
        elif min(tokens) >= READ_TOKENS_MIN:
            self.read_seconds = _mixed(self.read_seconds, seconds / sum(tokens))


def _mixed(before: float, seconds: float) -> float:
    return seconds if not before else before + SMOOTHING * (seconds - before)


def price_route(
    stages: Sequence[Sequence[StageReplica]],
    read_tokens: int,
    decode_tokens: int,
    *,
    sessions: Callable[[PeerId], int] = lambda _peer: 0,
    doubts: Mapping[PeerId, int] | None = None,
    spared: int = 0,
) -> Way | None:
    """Return one peer of each stage: the least doubted, and of these the quickest for the tokens to read and
    to make. `sessions` is how many the door itself has at a peer, of which `spared` do not count. None if
    there is no such route."""
    doubted = doubts or {}

    best: dict[PeerId, Way] = {}
    for number, replicas in enumerate(stages):
        ends = int(number == 0) + int(number == len(stages) - 1)
        before_it = stages[number - 1] if number else ()
        decode, read = (
            _least(each.decode_seconds for each in replicas),
            _least(each.read_seconds for each in replicas),
        )
        link = _least(each.links.get(other.peer, 0.0) for each in before_it for other in replicas)
        found: dict[PeerId, Way] = {}
        for each in replicas:
            load = LOAD_SECONDS * max(0, max(each.sessions, sessions(each.peer)) - spared)
            token = (each.decode_seconds or decode) + load + ends * each.seconds / 2
            doubt = doubted.get(each.peer, 0)
            seconds = read_tokens * (each.read_seconds or read) + decode_tokens * token
            if number == 0:
                found[each.peer] = (doubt, seconds, (each.peer,))
                continue
            ways = [
                (
                    way[0] + doubt,
                    way[1] + seconds + decode_tokens * _hop(before, each, link),
                    (*way[2], each.peer),
                )
                for before in before_it
                if (way := best.get(before.peer)) is not None
            ]
            if ways:
                found[each.peer] = min(ways)
        best = found
    return min(best.values(), default=None)


def _hop(before: StageReplica, after: StageReplica, usual: float) -> float:
    """Return how long a message takes to the next stage, which one peer may hold both of."""
    return 0.0 if before.peer == after.peer else before.links.get(after.peer) or usual


def _least(values: Iterable[float]) -> float:
    return min((value for value in values if value > 0), default=0.0)
