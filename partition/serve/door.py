"""The door, which is the node that asks a service: its generations, their units in progress, and their
routes.

A sans-IO core. The door keeps all tokens of a generation. They go through the stages of the service as units,
first chunks of the prompt and then the newest token, several of them in flight simultaneously. The last stage
answers with logits, from which the door chooses the next token (`partition.serve.sampling`).

A provider may be lost at any time: its stream breaks, or its node is silent. Then the generation takes
another route, under a new session, and sends all its tokens again. The same tokens give the same logits on
all machines of one bit class (replicas that compute the same bits), so the text continues unchanged. If a
stage has only providers of a different or unknown class, the event says so and the text continues anyway; if
the wish excludes that, the generation waits for a provider of its class. Answers of an earlier session are
ignored. If a stage has no provider, a generation waits and asks for routes, and ends with a reason if no
provider comes.

Tokens that another session of the same owner has read are not read again (`partition.serve.prefixes`): a
generation begins from that session, or waits while a shared prompt is still being read. So several answers to
one prompt read it only once.

If a generation `is_masked`, `permit` sets the allowed next tokens for each token, and a row of logits waits
until it is called. The allowed tokens of a position are kept, and hold for the new row after a failover.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

import numpy as np

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.codecs.base import Array
from partition.serve.events import ComputedFor as ComputedFor
from partition.serve.events import Embedded as Embedded
from partition.serve.events import Event as Event
from partition.serve.events import FinishReason as FinishReason
from partition.serve.events import GenerationOver as GenerationOver
from partition.serve.events import GenerationWish as GenerationWish
from partition.serve.events import HiddenRead as HiddenRead
from partition.serve.events import Misbehaved as Misbehaved
from partition.serve.events import RouteTaken as RouteTaken
from partition.serve.events import RouteWanted as RouteWanted
from partition.serve.events import Sampled as Sampled
from partition.serve.events import Shape as Shape
from partition.serve.generation import (
    OpenGeneration,
    OwnerShares,
    RouteAttempt,
    cut_units,
    follows_another,
    openings,
    read_answer,
    take_token,
)
from partition.serve.hearing import Hearing
from partition.serve.known_routes import KnownRoutes, Missing
from partition.serve.messages import (
    SESSION_BYTES,
    Alive,
    Answer,
    Carried,
    LeaveSession,
    Message,
    Sends,
    SessionClosed,
    SessionOpened,
)
from partition.serve.prefixes import Prefixes
from partition.serve.resting import RestingSessions
from partition.serve.routes import StageReplica as StageReplica
from partition.serve.timeouts import (
    ALIVE_SECONDS,
    ANSWER_SECONDS_MAX,
    LOADING_SECONDS_MAX,
    RETRY_SECONDS,
    ROUTE_SECONDS_MAX,
)

ATTEMPTS_MAX = 32
"""Number of successive routes that gave no token after which a generation fails. Otherwise a provider that
always refuses would be tried forever."""
GENERATIONS_MAX = 256
"""Maximum number of simultaneous generations of one node. Each belongs to a program or a person on this
machine."""


class Door:
    """All generations of the node `me`. `new_id(n)` returns n random bytes."""

    def __init__(self, me: PeerId, new_id: Callable[[int], bytes]) -> None:
        self.events: list[Event] = []
        self._me = me
        self._new_id = new_id
        self._numbers = 0
        self._generations: dict[int, OpenGeneration] = {}
        self._sessions: dict[bytes, OpenGeneration] = {}
        self._routes = KnownRoutes()
        self._hearing = Hearing()
        self._prefixes = Prefixes()
        self._resting = RestingSessions(self._prefixes)
        self._shares = OwnerShares()
        self._alive_at = inf

    # What this node wants

    @property
    def generations(self) -> int:
        """The number of generations that are not over."""
        return len(self._generations)

    def replicas(self, service: bytes) -> list[list[StageReplica]]:
        """Return the known replicas of a service's stages."""
        return self._routes.replicas(service)

    def knows(self, peer: PeerId) -> bool:
        """Return whether a peer serves a generation now."""
        return bool(self._using(peer))

    def begin(self, now: float, shape: Shape, wish: GenerationWish) -> tuple[int, Sends]:
        """Begin a generation; return its number. The prompt must have at least one token, and must leave room
        for one more."""
        self._hearing.note_time(now)
        self._numbers += 1
        found = OpenGeneration(self._numbers, shape, wish, list(wish.prompt), now)
        self._generations[found.number] = found
        return found.number, self._find_route(now, found)

    def cancel(self, now: float, generation: int) -> Sends:
        """End a generation; every stage forgets its session."""
        self._hearing.note_time(now)
        found = self._generations.get(generation)
        return [] if found is None else self._finish(now, found, "cancelled")

    def is_following(self, generation: int) -> bool:
        """Return whether a generation waits until another one has read the beginning that they share."""
        found = self._generations.get(generation)
        return found is not None and bool(found.follows)

    def permit(self, now: float, generation: int, allowed: Array) -> Sends:
        """Set the allowed next tokens, as a boolean for each token of the vocabulary. If none is allowed, the
        answer is over."""
        self._hearing.note_time(now)
        found = self._generations.get(generation)
        if found is None:
            return []
        if not allowed.any():
            return self._finish(now, found, "stop")
        found.allowed = allowed
        attempt = found.attempt
        return [] if attempt is None or attempt.row is None else self._sample(now, found, attempt)

    def learn(
        self,
        now: float,
        service: bytes,
        replicas: Mapping[int, Sequence[StageReplica]],
        loading: Collection[int] = (),
    ) -> Sends:
        """Set the replicas of a service's stages, as its members report them. `loading` are the stages that a
        member is loading."""
        self._hearing.note_time(now)
        self._routes.learn(service, replicas, loading)
        sends: Sends = []
        for each in list(self._generations.values()):
            if each.shape.service == service and each.attempt is None:
                sends += self._find_route(now, each)
        return sends

    # What others say

    def note_former(self, peer: PeerId) -> None:
        """Note that a peer speaks the previous version, without bases and hidden states."""
        self._routes.note_former(peer)

    @property
    def deadline(self) -> float:
        """The time of the next `wake`."""
        return min(self._alive_at, self._resting.deadline)

    def receive(self, now: float, sender: PeerId, message: Message | Carried) -> Sends:
        """Handle a provider's message. If its session is unknown, the session is over: ignore it."""
        self._hearing.note_time(now)
        self._hearing.heard(now, sender)
        match message:
            case SessionOpened():
                return self._on_opened(now, sender, message)
            case SessionClosed():
                return self._on_closed(now, sender, message)
            case Carried(message=Answer()):
                return self._on_answer(now, sender, message)
            case _:
                return []

    def lost(self, now: float, peer: PeerId, reason: str = "its stream broke") -> Sends:
        """Note that a provider is gone, or cannot be reached. Its generations continue on other routes."""
        return self._give_up(now, peer, reason, told=peer)

    def _give_up(self, now: float, peer: PeerId, reason: str, told: PeerId | None = None) -> Sends:
        """Move a provider's generations elsewhere, and close its sessions unless it is `told` already: a
        silent provider may still run, and its sessions would occupy places."""
        self._hearing.note_time(now)
        self._hearing.end(peer)
        self._routes.note_lost(now, peer)
        sends = self._resting.lost(peer, told)
        for each in self._using(peer):
            sends += self._leave_route(now, each, told, reason)
            self._ask_for_routes(now, each.shape.service)
        return sends

    def wake(self, now: float) -> Sends:
        """Send signs of life, detect silent providers, and look for missing routes."""
        self._hearing.note_time(now)
        sends: Sends = self._resting.wake(now, self._hearing)
        if now < self._alive_at:
            return sends
        self._alive_at = inf
        self._routes.expire(now)
        for peer, reason in self._hearing.silent(now, self._generations.values()):
            sends += self._give_up(now, peer, reason)
        for each in list(self._generations.values()):
            if each.attempt is not None:
                continue
            is_loaded = self._routes.is_loading(each.shape.service, each.missing_stage)
            if now - each.waits_since >= (LOADING_SECONDS_MAX if is_loaded else ROUTE_SECONDS_MAX):
                before = f" ({each.reason})" if each.reason and each.missing else each.reason
                sends += self._finish(now, each, "failed", each.missing + before)
            elif now >= each.retry_at:
                sends += self._find_route(now, each)
        for each in list(self._generations.values()):
            attempt = each.attempt
            if attempt is not None and attempt.flying and now - attempt.moved_at >= ANSWER_SECONDS_MAX:
                each.doubts.update(attempt.route)  # it is unknown which stage causes the delay
                sends += self._leave_route(now, each, None, f"no answer in {ANSWER_SECONDS_MAX:.0f} s")
        sends += [(peer, Alive()) for peer in self._hearing]
        if self._generations:
            self._alive_at = now + ALIVE_SECONDS
        return sends

    # Routes

    def _using(self, peer: PeerId) -> list[OpenGeneration]:
        return [
            each
            for each in self._generations.values()
            if each.attempt is not None and peer in each.attempt.route
        ]

    def _find_route(self, now: float, generation: OpenGeneration) -> Sends:
        """Take the best available route, or ask for routes."""
        generation.retry_at, generation.missing_stage = now + RETRY_SECONDS, -1
        self._alive_at = min(self._alive_at, now + ALIVE_SECONDS)
        shape = generation.shape
        known = self._routes.candidates(now, generation)
        if isinstance(known, Missing):
            generation.missing, generation.missing_stage = known.reason, known.stage
            self._ask_for_routes(now, shape.service)
            return []
        stages, is_exact = known
        route, base, shared = self._resting.choose(
            generation, stages, sessions=lambda peer: len(self._using(peer))
        )
        if follows_another(now, generation, self._generations.values(), shared, self._routes.is_current):
            return []
        generation.missing = ""
        generation.attempts += 1
        if generation.attempts > ATTEMPTS_MAX:
            return self._finish(now, generation, "failed", generation.reason)
        bits, has = self._routes.bits(shape.service, route), len(generation.tokens)
        attempt = RouteAttempt(self._new_id(SESSION_BYTES), route, now, bits, has, base, shared, sent=shared)
        generation.attempt = attempt
        self._prefixes.use(now, base)
        self._sessions[attempt.session] = generation
        taken = RouteTaken(generation.number, attempt.route, has, generation.reason, is_exact, shared)
        self.events.append(taken)
        self._hearing.begin(now, route)
        share = self._shares.share_of(generation.wish.owner, self._generations.values())
        return openings(self._me, generation, attempt, share)

    def _let_follow(self, now: float, leader: OpenGeneration) -> Sends:
        """Continue the generations that wait for this one: it has read the tokens, or will not."""
        known = inf if leader.attempt is None else leader.attempt.known
        sends: Sends = []
        for each in list(self._generations.values()):
            if each.follows == leader.number and each.attempt is None and each.follows_tokens <= known:
                sends += self._find_route(now, each)
        return sends

    def _ask_for_routes(self, now: float, service: bytes) -> None:
        if self._routes.may_look(now, service):
            self.events.append(RouteWanted(service))

    def _leave_route(self, now: float, generation: OpenGeneration, lost: PeerId | None, reason: str) -> Sends:
        """Continue on another route: the old stages forget the session, and all tokens are sent again."""
        sends = self._end_attempt(generation)
        sends = [(peer, message) for peer, message in sends if peer != lost]
        generation.waits_since, generation.reason = now, reason
        sends += self._find_route(now, generation)
        return sends + self._let_follow(now, generation)

    def _end_attempt(self, generation: OpenGeneration, rests_at: float | None = None) -> Sends:
        """Let the stages forget the session; or keep it for other generations, if it has read enough."""
        attempt, generation.attempt = generation.attempt, None
        if attempt is None:
            return []
        self._sessions.pop(attempt.session, None)
        if attempt.computed:
            self.events.append(ComputedFor(generation.shape.service, attempt.route, attempt.computed))
        for peer in attempt.route:
            if not self._using(peer):
                self._hearing.end(peer)
        may_share = self._routes.is_current(attempt.route)
        return self._resting.end(generation, attempt, rests_at, may_share=may_share)

    def _finish(
        self, now: float, generation: OpenGeneration, reason: FinishReason, detail: str = ""
    ) -> Sends:
        sends = self._end_attempt(generation, None if reason == "failed" else now)
        del self._generations[generation.number]
        sends += self._let_follow(now, generation)
        self.events.append(GenerationOver(generation.number, reason, detail))
        if not self._generations:
            self._alive_at = inf
            self._routes.expire(now)
        self._routes.keep_only({each.shape.service for each in self._generations.values()})
        return sends

    # Units and answers

    def _found(self, sender: PeerId, session: bytes) -> tuple[OpenGeneration, RouteAttempt] | None:
        generation = self._sessions.get(session)
        attempt = None if generation is None else generation.attempt
        if generation is None or attempt is None:
            return None
        if sender not in attempt.route:
            raise RemoteProtocolError("an answer is for a session that its sender does not serve")
        return generation, attempt

    def _on_opened(self, now: float, sender: PeerId, message: SessionOpened) -> Sends:
        found = self._found(sender, message.session)
        if found is None:
            return []
        generation, attempt = found
        stages = [stage for stage, peer in enumerate(attempt.route) if peer == sender]
        if message.stage is not None:
            stages = [stage for stage in stages if stage == message.stage]
        if len(stages) != 1:
            raise RemoteProtocolError("a stage was confirmed that its sender was not asked for")
        self._hearing.heard(now, sender)
        if generation.wish.is_hidden and not self._routes.is_current((sender,)):
            return self._leave_route(now, generation, None, "its version cannot answer with hidden states")
        attempt.opened.add(stages[0])
        return self._send_units(now, generation, attempt)

    def _on_closed(self, now: float, sender: PeerId, message: SessionClosed) -> Sends:
        found = self._found(sender, message.session)
        if found is None:
            return self._resting.ended(sender, message.session)
        generation, attempt = found
        if message.code == "position" and attempt.base:
            # The base session is gone, so this generation reads all its tokens itself.
            sends = self._resting.forget(attempt.base) + self._end_attempt(generation)
            return sends + self._find_route(now, generation) + self._let_follow(now, generation)
        if message.code == "length":
            return self._finish(now, generation, "length")
        # If the session was only evicted, the provider is sound and may be asked again immediately.
        pause = {"refused": inf, "evicted": 0.0, "position": 0.0}.get(message.code, RETRY_SECONDS)
        if pause:
            generation.avoided[sender] = now + pause
        if message.code == "failed":
            # Either the stage itself failed or its input was wrong. Either peer may lie.
            own = [stage for stage, peer in enumerate(attempt.route) if peer == sender]
            generation.doubts.update(set(attempt.route[max(0, own[0] - 1) : own[-1] + 1]))
        reason = message.reason or message.code
        # If the provider serves several stages of the route, only its first close counts.
        ends = attempt.route.count(sender) > 1
        left: Sends = [(sender, LeaveSession(attempt.session))] if ends else []
        return left + self._leave_route(now, generation, sender, reason)

    def _send_units(self, now: float, generation: OpenGeneration, attempt: RouteAttempt) -> Sends:
        """Send unsent tokens, as far as the window allows."""
        if not attempt.flying:
            attempt.moved_at = now
        return [(attempt.route[0], unit) for unit in cut_units(generation, attempt)]

    def _on_answer(self, now: float, sender: PeerId, carried: Carried) -> Sends:
        answer = carried.message
        assert isinstance(answer, Answer)
        found = self._found(sender, answer.session)
        if found is None:
            return []
        generation, attempt = found
        try:
            row = read_answer(sender, generation, attempt, carried)
        except RemoteProtocolError as error:
            self.events.append(Misbehaved(sender, str(error)))
            generation.avoided[sender] = inf
            return self._leave_route(now, generation, sender, str(error))
        work = attempt.flying.popleft()
        attempt.computed += work.tokens
        attempt.moved_at = now
        sends = self._note_read(now, generation, attempt)
        if generation.wish.is_hidden and attempt.computed == len(generation.tokens):
            self.events.append(HiddenRead(generation.number, np.concatenate(attempt.hidden)))
            return sends + self._finish(now, generation, "stop")
        if row is None:
            return sends + self._send_units(now, generation, attempt)
        generation.attempts, generation.reason, generation.waits_since = 0, "", now
        if generation.wish.is_vector:
            self.events.append(Embedded(generation.number, row.logits))
            return sends + self._finish(now, generation, "stop")
        attempt.row = row
        if generation.wish.is_masked and generation.allowed is None:
            return sends
        return sends + self._sample(now, generation, attempt)

    def _sample(self, now: float, generation: OpenGeneration, attempt: RouteAttempt) -> Sends:
        """Choose the next token from the row that arrived."""
        sampled = take_token(generation, attempt)
        if sampled is None:
            return self._finish(now, generation, "stop")
        self.events.append(sampled)
        return (
            self._finish(now, generation, "length")
            if generation.is_full
            else self._send_units(now, generation, attempt)
        )

    def _note_read(self, now: float, generation: OpenGeneration, attempt: RouteAttempt) -> Sends:
        """Note that more of the generation's initial tokens are computed, so others may begin from them."""
        is_kept = self._resting.note_read(
            generation, attempt, may_share=self._routes.is_current(attempt.route)
        )
        return self._let_follow(now, generation) if is_kept else []
