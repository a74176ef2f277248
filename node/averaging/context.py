"""The interface through which a participation in an averaging run uses its node."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from gossip.averaging.attempt import Attempt
from gossip.averaging.outcome import Averaged
from gossip.matchmaking import Matchmaking
from gossip.matchmaking import Sends as MatchSends
from gossip.roster import Sends as RosterSends
from node.averaging.runner import Runner
from node.events import Event
from node.seams import Seams


@dataclass(frozen=True)
class ParticipationService:
    """The averaging service as a participation uses it."""

    seams: Seams
    signer: Signer
    publish: Callable[[Event], None]
    refuse: Callable[[PeerId, RemoteProtocolError], None]
    tell: Callable[[Callable[[float], RosterSends]], None]
    match: Callable[[Callable[[float], MatchSends]], None]
    matches: Matchmaking
    start: Callable[[Runner], None]
    declare: Callable[[bytes, float], Awaitable[None]]
    averaged: Callable[[Attempt, Averaged], None]
    close: Callable[[], None]
