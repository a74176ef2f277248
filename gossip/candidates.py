"""Peers named by others that have not answered a ping yet; a peer is listed as a member only after it has.

A signature costs its author nothing, so one message can introduce thousands of invented peers. They wait
here, apart from the member list, bounded in number and probed at a bounded rate. Introducers take turns, so
an introducer of many peers only delays its own. When the table is full, a candidate of the introducer with
the most candidates is dropped.

Not here: probes (`gossip.swim`), and the member list (`gossip.state_table`).
"""

from dataclasses import dataclass

from crypto.identity import PeerId
from gossip.messages import AliveFact

PROBED_MAX = 32
"""Maximum number of candidates probed simultaneously. An honest list of 600 takes 2 s at a round trip of 100
ms, and invented peers are discarded at 70 per second."""
PROBED_AT_ONCE_MAX = 8
"""Maximum number of candidates contacted in one step: each may need a handshake of 0.8 ms."""
TRIES_MAX = 3
"""Number of probes per candidate. At 10 % loss one live candidate in 150 is missed, and introduced again
later."""


@dataclass(slots=True)
class Candidate:
    """An unknown peer to probe. `said` is proved by its signature, but `said.peer` may not exist.
    `passed_on`: the peer may be announced to others."""

    said: AliveFact
    introducer: PeerId
    passed_on: bool
    tries: int = 0
    is_probed: bool = False

    @property
    def peer(self) -> PeerId:
        return self.said.peer


class Candidates:
    """At most `most` candidates: `rows` has them by peer id, and `probed` of them are being probed."""

    __slots__ = ("_counts", "_most", "_waiting", "probed", "rows")

    def __init__(self, most: int) -> None:
        self.probed = 0
        self._most = most
        self.rows: dict[PeerId, Candidate] = {}
        self._counts: dict[PeerId, int] = {}
        # Candidates not being probed, by introducer, in the order of turns.
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
        """Return whether there is room for a candidate of this introducer, if necessary by replacing a
        different candidate."""
        return len(self.rows) < self._most or self._counts.get(introducer, 0) < max(self._counts.values())

    def put(self, candidate: Candidate) -> None:
        """Add a new candidate for which `takes` returned True."""
        if len(self.rows) >= self._most:
            greediest = max(self._counts, key=self._counts.__getitem__)
            told = [row.peer for row in self.rows.values() if row.introducer == greediest]
            self.pop(told[-1])
        self.rows[candidate.peer] = candidate
        self._counts[candidate.introducer] = self._counts.get(candidate.introducer, 0) + 1
        self._waiting.setdefault(candidate.introducer, {})[candidate.peer] = None

    def next(self) -> Candidate | None:
        """Return the next candidate and mark it as being probed. Return None if enough are being probed or
        none waits."""
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
        """Queue an unanswered candidate again, or drop it after TRIES_MAX."""
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
        """Remove all candidates."""
        self.__init__(self._most)  # type: ignore[misc]  # as new
