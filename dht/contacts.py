"""How a peer enters the routing table, stays there, and leaves it.

A peer becomes a contact once it has answered. A peer that sends a request, or that other peers or local code
name, is pinged first if the table has room for it. A verified contact's newest claim of its addresses
replaces the older one. Not here: the buckets (`dht.routing`) and periodic upkeep (`dht.upkeep`).
"""

from functools import partial
from typing import Protocol

from crypto.identity import PeerId
from dht import messages
from dht.events import Event, PeerHeard
from dht.groups import Origins
from dht.messages import CLIENT_ADDRESSES, address_texts, readable_addresses
from dht.replication import Replication
from dht.requests import PendingRequest
from dht.routing import Contact, Table
from dht.settings import KademliaSettings
from dht.timers import Timers
from dht.upkeep import Upkeep


class ContactsCore(Protocol):
    """The parts of the core that `Contacts` uses."""

    events: list[Event]
    origins: Origins
    replication: Replication
    settings: KademliaSettings
    table: Table
    timers: Timers
    upkeep: Upkeep

    def ask(self, now: float, contact: Contact, message: messages.Request, purpose: None) -> None: ...

    def ping_message(self) -> messages.Ping: ...


class Contacts:
    """The part of a core that decides which peers are in its table. Outside lookups, at most `checks_max`
    pings are in flight, and at most one per peer."""

    def __init__(self, core: ContactsCore) -> None:
        self._core = core
        self._table = core.table
        # The peers with a ping in flight outside lookups.
        self._checking: dict[PeerId, Contact] = {}

    def __len__(self) -> int:
        return len(self._checking)

    def add(self, now: float, peer: PeerId, texts: tuple[str, ...]) -> None:
        """Consider a peer that another part of the node monitors."""
        core, known = self._core, self._table.get(peer)
        if (asked := self._checking.get(peer)) is not None:
            asked.watched = True
        if known is not None:
            known.watched = True
            if known.silence is not None or (texts and texts != known.addresses):
                self.check(now, known)  # the peer itself must confirm its new addresses
        elif self._table.wants(peer, waiting=False, group=(group := core.origins.group(peer, texts))):
            contact = Contact(peer, texts, group)
            contact.watched = True
            self.check(now, contact)

    def unwatch(self, peer: PeerId) -> None:
        """Monitor `peer` here from now on, because no other part of the node does."""
        for contact in (self._table.get(peer), self._checking.get(peer)):
            if contact is not None:
                contact.watched = False

    def remove(self, now: float, peer: PeerId) -> None:
        """Remove a peer, and ping its possible replacement."""
        self._verify(now, self._table.remove(peer))

    def meet(self, now: float, sender: PeerId, texts: tuple[str, ...]) -> None:
        """Handle the sender of a request: refresh a known contact, ping an unknown peer if there is room, and
        remove a client."""
        if texts == CLIENT_ADDRESSES:
            self.remove(now, sender)
            return
        core, contact = self._core, self._table.heard(now, sender)
        if contact is not None:
            self._take_claim(contact, texts)
            if contact.silence is not None:
                self.check(now, contact)  # the contact is alive, and may be reachable again
        elif not core.upkeep.is_liar(now, sender) and self._table.wants(
            sender, group=(group := core.origins.group(sender, texts))
        ):
            self.check(now, Contact(sender, texts, group))

    def check(self, now: float, contact: Contact) -> None:
        """Ping a contact unless it is being pinged or too many pings are in flight."""
        if contact.peer in self._checking or len(self._checking) >= self._core.settings.checks_max:
            return
        self._checking[contact.peer] = contact
        self._core.ask(now, contact, self._core.ping_message(), None)

    def end_check(self, peer: PeerId) -> None:
        """Record that a ping was answered."""
        self._checking.pop(peer, None)

    def fail_check(self, contact: Contact) -> None:
        """Record that a ping was not answered in time."""
        self._checking.pop(contact.peer, None)
        if self._table.get(contact.peer) is None:
            contact.watched = False  # a late answer may arrive after the other part stopped monitoring

    def welcome(self, now: float, contact: Contact, texts: tuple[str, ...], token: bytes) -> None:
        """Add the contact, which has answered, to the table, unless it is a client."""
        if texts == CLIENT_ADDRESSES:
            self.remove(now, contact.peer)
            return
        core, table = self._core, self._table
        if core.upkeep.is_liar(now, contact.peer):
            return
        contact.group = core.origins.group(contact.peer, texts or contact.addresses)
        core.upkeep.found(contact.peer)
        is_known = table.get(contact.peer) is not None
        oldest = table.answered(now, contact)
        kept = table.get(contact.peer)
        if kept is not None:
            # the contact may meanwhile have been added by another path
            kept.watched = kept.watched or contact.watched
            if token:
                kept.token, kept.answered = token, now
            self._take_claim(kept, texts)
            if not is_known and token:
                core.replication.welcome(now, kept, token)
        self._verify(now, oldest)
        core.upkeep.begin(now)

    def fail(self, now: float, pending: PendingRequest) -> bool:
        """Record that a request was not answered in time; return whether the table is unaffected."""
        core, peer = self._core, pending.contact.peer
        known = self._table.get(peer)
        concerned = self._table.failed(now, peer, pending.started)
        if known is not None and self._table.get(peer) is None:
            core.upkeep.lose(now, known)
        if concerned is None:
            return True
        if concerned.peer == peer:
            core.timers.at(now + core.settings.recheck_seconds, partial(self._recheck, concerned))
        else:
            self._verify(now, concerned)
        return False

    def _recheck(self, contact: Contact, now: float) -> None:
        if contact.silence is not None and self._table.get(contact.peer) is contact:
            self.check(now, contact)

    def _verify(self, now: float, contact: Contact | None) -> None:
        """Ping a contact, if there is one, that has been silent for a while."""
        if contact is not None and contact.heard + self._core.settings.fresh_seconds <= now:
            self.check(now, contact)

    def _take_claim(self, contact: Contact, texts: tuple[str, ...]) -> None:
        """Replace a verified contact's addresses with those that it claims."""
        if not texts:
            return
        if texts == contact.addresses:
            contact.addresses = texts  # if messages are not copied, all receivers share one object
            return
        addresses = readable_addresses(texts, contact.peer)
        readable = address_texts(addresses)
        if readable and readable != contact.addresses:
            contact.addresses = readable
            self._core.events.append(PeerHeard(contact.peer, addresses))
