"""The requests a node has in flight: whom it asked, what for, and until when an answer is welcome.

An answer is taken only for a request that was made, from the peer it was made to, and of the kind
that fits it; everything else is refused before it can change anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from dht import messages
from dht.lookup import Lookup
from dht.records import Refusal
from dht.routing import Contact
from dht.timers import Timer


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

    `quiet` if it is upkeep, and nobody waits for its event.
    """

    number: int
    tried: int
    waiting: int
    quiet: bool
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
    attempts_left: int
    page: int
    timer: Timer | None = None
    passed_over: bool = False


class Requests:
    """Requests in flight by id. Ids are counted up from a random start, so a restart repeats none."""

    def __init__(self, rng: Random) -> None:
        self._last = rng.getrandbits(48)
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def new_id(self) -> int:
        self._last += 1
        return self._last

    def open(self, pending: Pending) -> None:
        self._pending[pending.message.id] = pending

    def close(self, pending: Pending) -> None:
        if pending.timer is not None:
            pending.timer.call_off()
        self._pending.pop(pending.message.id, None)

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
