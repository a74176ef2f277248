"""The requests that a node has in flight: the peer asked, the purpose, and how long an answer is accepted.

An answer is accepted only if it fits a request that was made, in its kind and in the peer that was asked.
Every other answer is refused before it can change anything.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from random import Random

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from dht import messages
from dht.lookup import Lookup
from dht.paths import DisjointLookup
from dht.records import Record, Refusal, check_record
from dht.routing import Contact, Trip
from dht.settings import KademliaSettings
from dht.timers import Timer, Timers

PATIENCE_SECONDS_MIN = 0.02
"""Minimum time before a request is repeated. On a local network answers come within a millisecond, but a busy
Python process may pause for ten."""

PATIENCE_TRIPS = 3
"""A peer is passed over after this many of its usual round trips: one for the first request, one for the
second, and one as a margin."""
SILENCE_SECONDS_MIN = 0.15
"""Minimum time before a peer is passed over: a process that trains, or collects garbage, may pause for 0.1
s."""


@dataclass(eq=False)
class Search:
    """A lookup and its continuation: `then(now, search)`.

    `gives`: a record, and the peers on which the lookup itself stores it. `told`: the replies of those peers,
    "" for kept.
    """

    number: int
    lookup: Lookup | DisjointLookup
    then: Callable[[float, "Search"], None]
    time_limit: Timer | None = None
    gives: tuple[Record | None, Collection[PeerId]] = (None, ())
    told: dict[PeerId, str] = field(default_factory=dict)


@dataclass(eq=False)
class Publication:
    """The second half of a store: the peers that have not answered yet, and the number of holders.

    `quiet`: it is upkeep, so no event reports its end. `wanted`: the minimum number of holders for success.
    `rounds`: the number of rounds of its lookup.
    """

    number: int
    tried: int
    waiting: int
    quiet: bool
    wanted: int
    rounds: int
    acknowledged: int = 0
    refusals: tuple[Refusal, ...] = ()

    def count(self, refused: str | None) -> None:
        """Count one node's answer: "" for kept, a reason for a refusal, or None for no answer."""
        self.waiting -= 1
        if refused == "":
            self.acknowledged += 1
        elif refused in tuple(Refusal):
            # Keep only known reasons, so that text from unknown peers is never shown to people.
            self.refusals = tuple(dict.fromkeys((*self.refusals, Refusal(refused))))


@dataclass(frozen=True)
class Inquiry:
    """A question to one peer from local code or upkeep. `then(now, token, seconds)` receives its outcome;
    `token` is None if the peer was silent."""

    then: Callable[[float, bytes | None, float], None]


@dataclass(eq=False)
class PendingRequest:
    """One request in flight. `purpose` is None for a ping that checks a contact."""

    contact: Contact
    message: messages.Request
    purpose: Search | Publication | Inquiry | None
    page: int
    started: float
    timer: Timer | None = None
    passed_over: bool = False


def learn_trip(trip: Trip | None, seconds: float) -> Trip:
    """Return the smoothed mean and deviation of round-trip times after one more measurement (RFC 6298).

    The time counts from the first transmission even if the second was answered, because an overestimate is on
    the safe side.
    """
    if trip is None:
        return seconds, seconds / 2
    mean, deviation = trip
    return mean + (seconds - mean) / 8, deviation + (abs(seconds - mean) - deviation) / 4


class AnswerPatience:
    """The usual answer time: of the peer itself if it has answered before, else of all peers."""

    __slots__ = ("_settings", "_trip")

    def __init__(self, settings: KademliaSettings) -> None:
        self._settings = settings
        self._trip: Trip | None = None

    def learn(self, contact: Contact, seconds: float) -> None:
        """Include one round-trip time of a contact in the averages."""
        self._trip = learn_trip(self._trip, seconds)
        contact.trip = learn_trip(contact.trip, seconds)

    def repeat_seconds(self, contact: Contact) -> float:
        """Return the time after which this peer counts as slow and is sent the request once more."""
        settings = self._settings
        if contact.trip is not None:
            return _bounded(contact.trip, settings.request_seconds_max / 2)
        if self._trip is None:
            return settings.request_seconds / 2
        return _bounded(self._trip, settings.request_seconds / 2)

    def silence_seconds(self, contact: Contact) -> float:
        """Return the time after which this peer is passed over; it leaves time for an answer to the second
        request."""
        longest = (
            self._settings.request_seconds if contact.trip is None else self._settings.request_seconds_max
        )
        return min(max(PATIENCE_TRIPS * self.repeat_seconds(contact), SILENCE_SECONDS_MIN), longest)


def _bounded(trip: Trip, seconds_max: float) -> float:
    mean, deviation = trip
    return min(max(mean + 4 * deviation, PATIENCE_SECONDS_MIN), seconds_max)


class Requests:
    """The requests in flight, by id. Ids count up from a random start, so they do not repeat after a restart.

    `send` sends a request. `slow` is called when its answer takes longer than usual; the request has then
    just been sent again, because it or its answer may be lost. `silent` is called when its time is up.
    """

    __slots__ = ("_last", "_patience", "_pending", "_send", "_settings", "_silent", "_slow", "_timers")

    def __init__(
        self,
        settings: KademliaSettings,
        rng: Random,
        timers: Timers,
        *,
        send: Callable[[PeerId, messages.Message], None],
        slow: Callable[[float, PendingRequest], None],
        silent: Callable[[float, PendingRequest], None],
    ) -> None:
        self._settings = settings
        self._timers = timers
        self._send = send
        self._slow = slow
        self._silent = silent
        self._patience = AnswerPatience(settings)
        self._last = rng.getrandbits(48)
        self._pending: dict[int, PendingRequest] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def new_id(self) -> int:
        self._last += 1
        return self._last

    def open(self, pending: PendingRequest) -> None:
        """Send a request, and send it again if its answer takes longer than usual."""
        pending.timer = self._timers.at(
            pending.started + self._patience.repeat_seconds(pending.contact), partial(self._repeat, pending)
        )
        self._pending[pending.message.id] = pending
        self._send(pending.contact.peer, pending.message)

    def answered(self, sender: PeerId, answer: messages.Answer) -> PendingRequest | None:
        """Return the request that `answer` belongs to, which stays open; None if the answer came too late.

        Raises:
            RemoteProtocolError: the answer is of the wrong kind, or from a peer that was not asked.
        """
        pending = self._pending.get(answer.id)
        if pending is None:
            return None
        if pending.contact.peer != sender:
            raise RemoteProtocolError("an answer from a peer that was not asked")
        if not isinstance(answer, messages.ANSWER_OF[type(pending.message)]):
            raise RemoteProtocolError(
                f"{type(answer).__name__} in answer to {type(pending.message).__name__}"
            )
        return pending

    def close(self, now: float, pending: PendingRequest) -> None:
        """Close a request after a good answer."""
        self._patience.learn(pending.contact, now - pending.started)
        if pending.timer is not None:
            pending.timer.call_off()
        del self._pending[pending.message.id]

    def spoil(self, now: float, pending: PendingRequest) -> None:
        """End a request whose answer was bad: it times out at the next wake, which is due immediately."""
        if pending.passed_over:
            return
        if pending.timer is not None:
            pending.timer.call_off()
        pending.timer = self._timers.at(now, partial(self._pass_over, pending))

    def _repeat(self, pending: PendingRequest, now: float) -> None:
        due = max(pending.started + self._patience.silence_seconds(pending.contact), now)
        pending.timer = self._timers.at(due, partial(self._pass_over, pending))
        self._send(pending.contact.peer, pending.message)
        self._slow(now, pending)

    def _pass_over(self, pending: PendingRequest, now: float) -> None:
        pending.passed_over = True
        due = now + self._settings.late_seconds
        pending.timer = self._timers.at(due, lambda _: self._forget(pending))
        self._silent(now, pending)

    def _forget(self, pending: PendingRequest) -> None:
        del self._pending[pending.message.id]


def checked_page(signer: Signer, pending: PendingRequest, answer: messages.Values) -> list[Record]:
    """Return the records of a page. All of them are valid and have the requested key.

    Raises:
        RemoteProtocolError: a record is invalid or has a different key, or the page is out of order.
    """
    search = pending.purpose
    if not isinstance(search, Search) or not isinstance(pending.message, messages.FindValue):
        return []
    if answer.more and not answer.records:
        raise RemoteProtocolError("an empty page with more behind it")
    records = []
    last = pending.message.after
    for fact in answer.records:
        if fact.author <= last:
            raise RemoteProtocolError("a page of records out of order")
        last = fact.author
        # Most holders hold the same records, so each record is verified only once.
        known = search.lookup.records.get(PeerId(fact.author))
        record = known if known and known.fact == fact else check_record(signer, fact)
        if record.key != search.lookup.key:
            raise RemoteProtocolError("a record of another key than asked for")
        records.append(record)
    return records
