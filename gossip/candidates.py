"""Strangers named by others, until they answer a ping themselves: only then are they listed.

A signature costs its author nothing, so one message can introduce thousands of invented peers. They wait
here, apart from the list, bounded in number and probed at a bounded rate. Introducers take turns, so that an
introducer of many only delays its own. A full table drops a candidate of the introducer with the most.

Not here: probes (`gossip.swim`), and the member list (`gossip.state_table`).
"""

from dataclasses import dataclass

from crypto.identity import PeerId
from gossip.messages import AliveFact

PROBED_MAX = 32
"""Candidates probed at once: an honest list of 600 takes 2 s at a round trip of 100 ms, and invented ones are
dropped at 70 a second."""
PROBED_AT_ONCE_MAX = 8
"""Candidates contacted in one step: each may take a handshake of 0.8 ms."""
TRIES_MAX = 3
"""Probes of one candidate: at 10 % loss one live candidate in 150 is missed, and introduced again later."""


@dataclass(slots=True)
class Candidate:
    """A stranger to probe. `said` is proved by its signature, though `said.peer` may not exist. `passed_on`:
    others may be told of it."""

    said: AliveFact
    introducer: PeerId
    passed_on: bool
    tries: int = 0
    is_probed: bool = False

    @property
    def peer(self) -> PeerId:
        return self.said.peer


class Candidates:
    """At most `most` candidates: `rows` by peer id, `probed` of them in flight."""

    __slots__ = ("_counts", "_most", "_waiting", "probed", "rows")

    def __init__(self, most: int) -> None:
        self.probed = 0
        self._most = most
        self.rows: dict[PeerId, Candidate] = {}
        self._counts: dict[PeerId, int] = {}
        # Candidates not in flight by introducer, in the order of turns.
        self._waiting: dict[PeerId, dict[PeerId, None]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, peer: object) -> bool:
        return peer in self.rows

    @property
    def is_due(self) -> bool:
        """Whether a candidate should be probed now."""
        return bool(self._waiting) and self.probed < PROBED_MAX

    def get(self, peer: PeerId) -> Candidate | None:
        return self.rows.get(peer)

    def takes(self, introducer: PeerId) -> bool:
        """Return whether there is room for a candidate of this introducer, if necessary in place of
        another."""
        return len(self.rows) < self._most or self._counts.get(introducer, 0) < max(self._counts.values())

    def put(self, candidate: Candidate) -> None:
        """Add a new candidate that `takes` allows."""
        if len(self.rows) >= self._most:
            greediest = max(self._counts, key=self._counts.__getitem__)
            told = [row.peer for row in self.rows.values() if row.introducer == greediest]
            self.pop(told[-1])
        self.rows[candidate.peer] = candidate
        self._counts[candidate.introducer] = self._counts.get(candidate.introducer, 0) + 1
        self._waiting.setdefault(candidate.introducer, {})[candidate.peer] = None

    def next(self) -> Candidate | None:
        """Return the next candidate to probe and mark it in flight; None while enough are in flight or none
        waits."""
        if not self.is_due:
            return None
        introducer = next(iter(self._waiting))
        told = self._waiting.pop(introducer)
        candidate = self.rows[next(iter(told))]
        del told[candidate.peer]
        if told:
            self._waiting[introducer] = told
        self.probed += 1
        candidate.is_probed = True
        candidate.tries += 1
        return candidate

    def retry(self, peer: PeerId) -> None:
        """Let an unanswered candidate wait again, or drop it after TRIES_MAX."""
        candidate = self.rows.get(peer)
        if candidate is None or not candidate.is_probed:
            return
        if candidate.tries >= TRIES_MAX:
            self.pop(peer)
            return
        self.probed -= 1
        candidate.is_probed = False
        self._waiting.setdefault(candidate.introducer, {})[peer] = None

    def pop(self, peer: PeerId) -> Candidate | None:
        """Remove a candidate."""
        candidate = self.rows.pop(peer, None)
        if candidate is None:
            return None
        self.probed -= candidate.is_probed
        left = self._counts[candidate.introducer] - 1
        if left:
            self._counts[candidate.introducer] = left
        else:
            del self._counts[candidate.introducer]
        told = self._waiting.get(candidate.introducer)
        if told is not None:
            told.pop(peer, None)
            if not told:
                del self._waiting[candidate.introducer]
        return candidate

    def clear(self) -> None:
        """Forget all."""
        self.__init__(self._most)  # type: ignore[misc]  # as new
