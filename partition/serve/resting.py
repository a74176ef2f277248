"""The sessions of a door (the node that asks) that rest at their stages, so that a later generation can begin
from them.

A sans-IO part of `partition.serve.door`. It decides which messages stages get when a generation ends, when a
resting session is no longer wanted, and to show that the door is still alive. `partition.serve.prefixes`
records which sessions there are.
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
    """The resting sessions of one door, among its `prefixes`."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.deadline = inf
        """The time of the next `wake`."""
        self._prefixes = prefixes

    def choose(
        self,
        generation: OpenGeneration,
        stages: Sequence[Sequence[StageReplica]],
        *,
        sessions: Callable[[PeerId], int],
    ) -> tuple[tuple[PeerId, ...], bytes, int]:
        """Return the route of a generation, the session from which it begins, and how many tokens it takes
        over from that session (see `choose_beginning`). `sessions` returns how many sessions a peer has
        now."""
        wish = generation.wish
        return choose_beginning(
            # hidden states of tokens that were read before are not available
            Prefixes() if wish.is_hidden else self._prefixes,
            generation.key,
            generation.tokens,
            max(1, len(wish.prompt) + wish.tokens_max - len(generation.tokens)),
            stages,
            sessions=sessions,
            doubts=generation.doubts,
        )

    def note_read(self, generation: OpenGeneration, attempt: RouteAttempt, *, may_share: bool) -> bool:
        """Note that more of the generation's initial tokens are computed; return whether others may begin
        from them."""
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
        """End the session of an attempt. If it has read enough, its stages keep it for others from `rests_at`
        on; otherwise they forget it. `may_share`: sessions on its route may share."""
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
        """Let no generation begin from a session any more. If it rested, its stages forget it."""
        rested = self._prefixes.resting_session(session)
        self._prefixes.drop(session)
        return [] if rested is None else let_go([rested], besides)

    def ended(self, sender: PeerId, session: bytes) -> Sends:
        """Note that a stage no longer keeps a resting session. Raises RemoteProtocolError if the sender does
        not serve that session."""
        rested = self._prefixes.resting_session(session)
        if rested is not None and sender not in rested.route:
            raise RemoteProtocolError("the end of a session was reported by a peer that does not serve it")
        return self.forget(session, besides=sender)

    def lost(self, peer: PeerId, told: PeerId | None) -> Sends:
        """Drop the sessions of a lost provider. The other stages forget those that rested, except at the peer
        `told`, which needs no message."""
        return let_go(self._prefixes.drop_peer(peer), besides=told)

    def wake(self, now: float, told: Container[PeerId]) -> Sends:
        """Drop sessions that have not been used for long, and send signs of life to the other providers,
        except those that get one because of a generation (`told`)."""
        if now < self.deadline:
            return []
        sends = let_go(self._prefixes.expire(now))
        peers = {peer for each in self._prefixes.resting for peer in each.route}
        self.deadline = now + REST_ALIVE_SECONDS if peers else inf
        return sends + [(peer, Alive()) for peer in sorted(peers) if peer not in told]
