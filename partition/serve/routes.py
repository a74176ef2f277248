"""The choice of a session's route over a service's replicas: the route with the shortest expected time for
the whole answer.

Each stage reads all tokens in chunks, and then computes one token after another. Each token crosses every
link of the route and returns to the door (the node that asks). So reading and decoding have separate prices:
the first dominates for a long prompt, the second for a long answer. Each session slows a replica down. An
unmeasured replica counts as fast as the fastest of its stage, so a new replica is tried, but does not get all
sessions. Not here: the measurements (`node.serving`), and leaving a route (`partition.serve.door`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from crypto.identity import PeerId

LOAD_SECONDS = 0.005
"""Cost of each session at a provider, in seconds per token, in addition to the measured times."""
SMOOTHING = 0.2
"""Weight of the newest measurement in the moving average."""
DECODED_TOKENS_MAX = 4
"""Maximum number of tokens per session in a call that counts as decoding: one token, or a few that are
verified."""
READ_TOKENS_MIN = 64
"""Minimum number of tokens per session in a call that counts as reading. A call in between says little about
either."""
SECONDS_MAX = 60.0
"""Maximum duration of a call that counts. A longer one comes from a machine that was asleep."""

Way = tuple[int, float, tuple[PeerId, ...]]
"""A priced route: doubts, seconds, and the peers from the first stage on."""


@dataclass(frozen=True)
class StageReplica:
    """A provider that answers for a stage.

    `seconds` is the round-trip time between the provider and the door, `decode_seconds` its time for one
    token, `read_seconds` its time per token of a prompt, and `links` the time that a message takes to each
    other peer. 0, or a missing entry, means not measured. `bits` is the bit class that it claims
    (`partition.execute.bit_class`), or empty.
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
    """A stage's times, from its answered calls; 0 if it has answered none of this kind."""

    decode_seconds: float = 0.0
    read_seconds: float = 0.0

    def note(self, tokens: Sequence[int], seconds: float) -> None:
        """Note the duration of a call, and the number of tokens of each of its units."""
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
    """Return one peer for each stage: the route with the fewest doubts and, among those, the fastest for the
    tokens to read and to generate. `sessions` returns how many sessions the door itself has at a peer;
    `spared` of them do not count. None if there is no route."""
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
    """Return how long a message takes to the next stage; 0 if the same peer holds both stages."""
    return 0.0 if before.peer == after.peer else before.links.get(after.peer) or usual


def _least(values: Iterable[float]) -> float:
    return min((value for value in values if value > 0), default=0.0)
