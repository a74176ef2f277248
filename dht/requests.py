"""The requests a node has in flight: whom it asked, what for, and until when an answer is welcome.

An answer is taken only for a request that was made, from the peer it was made to, and of the kind
that fits it; everything else is refused before it can change anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from dht import messages
from dht.lookup import Lookup
from dht.records import Record, Refusal, check_record
from dht.routing import Contact
from dht.settings import Settings
from dht.timers import Timer, Timers

PATIENCE_SECONDS_MIN = 0.02
"""On a local network answers come in a millisecond, but a busy Python process may pause for ten."""


@dataclass(eq=False)
class Search:
    """A lookup and what follows when it ends: `then(now, search)`."""

    number: int
    lookup: Lookup
    then: Callable[[float, "Search"], None]
    time_limit: Timer | None = None


@dataclass(eq=False)
class Publication:
    """The second half of a store: who still has to answer, and how many keep the record.

    `quiet` if it is upkeep, and nobody waits for its event; `rounds` are those of its lookup.
    """

    number: int
    tried: int
    waiting: int
    quiet: bool
    rounds: int
    acknowledged: int = 0
    refusals: tuple[Refusal, ...] = ()

    def count(self, refused: str | None) -> None:
        """One node's answer: "" for kept, a reason, or None for no answer at all."""
        self.waiting -= 1
        if refused == "":
            self.acknowledged += 1
        elif refused in tuple(Refusal):
            # Only reasons that we know ourselves: what a stranger writes is not shown to people.
            self.refusals = tuple(dict.fromkeys((*self.refusals, Refusal(refused))))


@dataclass(eq=False)
class Pending:
    """One request in flight. `purpose` is None for a ping that checks a contact."""

    contact: Contact
    message: messages.Request
    purpose: Search | Publication | None
    page: int
    started: float
    timer: Timer | None = None
    passed_over: bool = False


class Patience:
    """How long an answer usually takes: smoothed mean and deviation over all peers (RFC 6298).

    Measured from the first sending even where the second was answered: too long is the safe side.
    """

    __slots__ = ("_deviation", "_mean", "_seconds_max")

    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max
        self._mean: float | None = None
        self._deviation = 0.0

    def learn(self, seconds: float) -> None:
        """One round trip."""
        if self._mean is None:
            self._mean = seconds
            self._deviation = seconds / 2
            return
        self._deviation += (abs(seconds - self._mean) - self._deviation) / 4
        self._mean += (seconds - self._mean) / 8

    @property
    def seconds(self) -> float:
        """After this a peer is slower than usual."""
        if self._mean is None:
            return self._seconds_max
        return min(max(self._mean + 4 * self._deviation, PATIENCE_SECONDS_MIN), self._seconds_max)


class Requests:
    """Requests in flight by id. Ids are counted up from a random start, so a restart repeats none.

    A request is sent with `send`; `slow` is called when its answer takes longer than usual (it has
    just been sent again, for it or its answer may be lost), `silent` when its time is up.
    """

    __slots__ = ("_last", "_patience", "_pending", "_send", "_settings", "_silent", "_slow", "_timers")

    def __init__(
        self,
        settings: Settings,
        rng: Random,
        timers: Timers,
        *,
        send: Callable[[PeerId, messages.Message], None],
        slow: Callable[[float, Pending], None],
        silent: Callable[[float, Pending], None],
    ) -> None:
        self._settings = settings
        self._timers = timers
        self._send = send
        self._slow = slow
        self._silent = silent
        self._patience = Patience(settings.request_seconds / 2)
        self._last = rng.getrandbits(48)
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def new_id(self) -> int:
        self._last += 1
        return self._last

    def open(self, pending: Pending) -> None:
        """Send a request, and once more if that seems needed."""
        pending.timer = self._timers.at(
            pending.started + self._patience.seconds, partial(self._repeat, pending)
        )
        self._pending[pending.message.id] = pending
        self._send(pending.contact.peer, pending.message)

    def answered(self, sender: PeerId, answer: messages.Answer) -> Pending | None:
        """The request that `answer` belongs to; None if it came too late. It stays open.

        Raises:
            RemoteProtocolError: from another peer than the one asked, or of another kind.
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

    def close(self, now: float, pending: Pending) -> None:
        """Its answer was good: nothing more is awaited."""
        self._patience.learn(now - pending.started)
        if pending.timer is not None:
            pending.timer.call_off()
        del self._pending[pending.message.id]

    def _repeat(self, pending: Pending, now: float) -> None:
        due = max(pending.started + self._settings.request_seconds, now)
        pending.timer = self._timers.at(due, partial(self._pass_over, pending))
        self._send(pending.contact.peer, pending.message)
        self._slow(now, pending)

    def _pass_over(self, pending: Pending, now: float) -> None:
        pending.passed_over = True
        due = now + self._settings.late_seconds
        pending.timer = self._timers.at(due, lambda _: self._forget(pending))
        self._silent(now, pending)

    def _forget(self, pending: Pending) -> None:
        del self._pending[pending.message.id]


def checked_page(signer: Signer, pending: Pending, answer: messages.Values) -> list[Record]:
    """The records of a page, all of them good and of the key that was asked for.

    Raises:
        RemoteProtocolError: one of them is not, or the page is out of order.
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
        # Most holders hold the same: what was checked once is not checked again.
        known = search.lookup.records.get(PeerId(fact.author))
        record = known if known and known.fact == fact else check_record(signer, fact)
        if record.key != search.lookup.key:
            raise RemoteProtocolError("a record of another key than asked for")
        records.append(record)
    return records
