"""The sessions of a door that rest at their stages, so that a later generation begins from them.

A sans-IO part of `partition.serve.door`: what stages are told when a generation ends, when a resting session
is no longer wanted, and that its door still lives. Which sessions there are is `partition.serve.prefixes`.
"""

from collections.abc import Callable, Container, Sequence
from math import inf

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.serve.generation import OpenGeneration, RouteAttempt, let_go
from partition.serve.messages import Alive, LeaveSession, RestSession, Sends
from partition.serve.prefixes import PREFIX_TOKENS_MIN, KeptPrefix, Prefixes, choose_beginning
from partition.serve.provider import REST_ALIVE_SECONDS
from partition.serve.routes import StageReplica


class RestingSessions:
    """Those of one door, among its `prefixes`."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.deadline = inf
        """When `wake` is due."""
        self._prefixes = prefixes

    def choose(
        self,
        generation: OpenGeneration,
        stages: Sequence[Sequence[StageReplica]],
        *,
        sessions: Callable[[PeerId], int],
    ) -> tuple[tuple[PeerId, ...], bytes, int]:
        """Return the route of a generation, the session that it begins from and how many tokens that has
        read, as `choose_beginning` does. `sessions`: how many a peer has now."""
        wish = generation.wish
        return choose_beginning(
            Prefixes() if wish.is_hidden else self._prefixes,  # rows that were read before are not to be had
            generation.key,
            generation.tokens,
            max(1, len(wish.prompt) + wish.tokens_max - len(generation.tokens)),
            stages,
            sessions=sessions,
            doubts=generation.doubts,
        )

    def note_read(self, generation: OpenGeneration, attempt: RouteAttempt, *, may_share: bool) -> bool:
        """Note that more of its initial tokens are computed; return whether others may begin from them."""
        # An encoder's state depends on the whole text, so no other session can begin from it.
        may_share &= not generation.wish.is_vector
        if not may_share or not PREFIX_TOKENS_MIN <= attempt.known <= attempt.reads:
            return False
        kept = KeptPrefix(attempt.session, generation.key, attempt.route)
        self._prefixes.put(kept, generation.tokens[: attempt.known])
        return True

    def end(
        self, generation: OpenGeneration, attempt: RouteAttempt, rests_at: float | None, *, may_share: bool
    ) -> Sends:
        """End the session of an attempt: from `rests_at` on its stages keep it for others if it has read
        enough, else they forget it. `may_share`: sessions of its route may share."""
        peers = dict.fromkeys(attempt.route)
        rests = may_share and not generation.wish.is_vector and attempt.is_open
        if rests_at is None or not rests or attempt.known < PREFIX_TOKENS_MIN:
            self._prefixes.drop(attempt.session)
            return [(peer, LeaveSession(attempt.session)) for peer in peers]
        kept = KeptPrefix(attempt.session, generation.key, attempt.route)
        gone = self._prefixes.rest(rests_at, kept, generation.tokens[: attempt.known])
        self.deadline = min(self.deadline, rests_at + REST_ALIVE_SECONDS)
        return [(peer, RestSession(attempt.session)) for peer in peers] + let_go(gone)

    def forget(self, session: bytes, besides: PeerId | None = None) -> Sends:
        """Let no generation begin from a session any more; if it rested, its stages forget it."""
        rested = self._prefixes.resting_session(session)
        self._prefixes.drop(session)
        return [] if rested is None else let_go([rested], besides)

    def ended(self, sender: PeerId, session: bytes) -> Sends:
        """Note that a stage no longer keeps a resting session. Raises RemoteProtocolError: the sender has no
        part in it."""
        rested = self._prefixes.resting_session(session)
        if rested is not None and sender not in rested.route:
            raise RemoteProtocolError("the end of a session of others")
        return self.forget(session, besides=sender)

    def lost(self, peer: PeerId, told: PeerId | None) -> Sends:
        """Drop the sessions of a lost provider; the other stages forget those that rest, except at a peer
        that is `told` already."""
        return let_go(self._prefixes.drop_peer(peer), besides=told)

    def wake(self, now: float, told: Container[PeerId]) -> Sends:
        """Let go of long unused sessions, and send signs of life to the other providers but those `told` by
        a generation."""
        if now < self.deadline:
            return []
        sends = let_go(self._prefixes.expire(now))
        peers = {peer for each in self._prefixes.resting for peer in each.route}
        self.deadline = now + REST_ALIVE_SECONDS if peers else inf
        return sends + [(peer, Alive()) for peer in sorted(peers) if peer not in told]
