"""Machines on a simulated internet with routers: which can reach each other, and their TCP connections.
Pure."""

from dataclasses import dataclass

from crypto.identity import PeerId
from sim.network.routers import FIREWALL, PRESETS, Endpoint, Preset, RoutedSite, Transport

PORT = 9_747
"""The port on which all machines listen."""
HAS_IPV6: tuple[Preset, ...] = ("none", "firewall6")
"""The presets of machines with a global IPv6 address: those with public addresses, and those behind an IPv6
firewall."""
BEHIND_ONE_MAX = 200
"""Maximum number of machines behind one router."""


@dataclass(frozen=True)
class Card:
    """One address of a machine, and the site that it is in; None if it is on the internet itself."""

    inner: Endpoint
    site: RoutedSite | None = None


class RoutedMachine:
    """A peer's machine, with one address for each of its address families."""

    __slots__ = ("cards", "is_up", "peer")

    def __init__(self, peer: PeerId, cards: dict[int, Card]) -> None:
        self.peer = peer
        self.cards = cards
        self.is_up = False

    @property
    def site(self) -> RoutedSite | None:
        """The machine's site by IPv4."""
        return self.cards[4].site

    def family(self, other: "RoutedMachine") -> int:
        """Return the address family by which the two machines reach each other best. IPv6 is better, because
        its firewalls do not translate ports."""
        return 6 if 6 in self.cards and 6 in other.cards else 4

    def lets_in(self, other: "RoutedMachine", now: float) -> bool:
        """Return whether `other` can dial this machine."""
        card = self.cards[self.family(other)]
        return card.site is None or card.site is other.cards[self.family(other)].site or (
            card.site.lets_in("tcp", card.inner, now)
        )  # fmt: skip

    def place_for(self, other: "RoutedMachine", transport: Transport, now: float) -> Endpoint | None:
        """Return the address to which `other` sends a packet for this machine: its own address, or one at
        which its router accepts packets from all; None if others know no such address."""
        family = self.family(other)
        card = self.cards[family]
        if card.site is None or card.site is other.cards[family].site:
            return card.inner
        # Others must have dialled the address successfully before; a router that drops inbound traffic never
        # confirms one.
        return card.site.place(transport, card.inner, now) if self.lets_in(other, now) else None


def carry(
    transport: Transport, one: RoutedMachine, other: RoutedMachine, to: Endpoint, now: float
) -> Endpoint | None:
    """Send a packet of `one` to the endpoint `to`. Return its apparent source if it reaches `other`, else
    None."""
    family = 6 if any(card.inner == to for card in (other.cards.get(6),) if card) else 4
    card, there = one.cards.get(family), other.cards.get(family)
    if card is None or there is None:
        return None
    if card.site is not None and card.site is there.site:
        if to == there.inner:
            return card.inner
        source = card.site.leave(transport, card.inner, to, now)
        turned = card.site.turn(transport, card.inner, to, now)
        return source if turned == there.inner else None
    source = card.inner if card.site is None else card.site.leave(transport, card.inner, to, now)
    if source is None:
        return None
    place = to if there.site is None else there.site.enter(transport, source, to, now)
    return source if place == there.inner else None


@dataclass(frozen=True)
class TcpLink:
    """A TCP connection that `one` has opened to `other` at `to`; `other` sees it come from `source`."""

    one: RoutedMachine
    other: RoutedMachine
    to: Endpoint
    source: Endpoint

    def passes(self, sender: RoutedMachine, now: float) -> bool:
        """Send a packet on the connection; return whether it reaches the other end."""
        if not (self.one.is_up and self.other.is_up):
            return False
        if sender is self.one:
            return carry("tcp", self.one, self.other, self.to, now) == self.source
        return carry("tcp", self.other, self.one, self.source, now) == self.to


def connect(one: RoutedMachine, other: RoutedMachine, to: Endpoint | None, now: float) -> TcpLink | None:
    """Open a connection from the port on which `one` listens; return None if that fails."""
    if to is None or not (one.is_up and other.is_up):
        return None
    source = carry("tcp", one, other, to, now)
    if source is None:
        return None
    made = TcpLink(one, other, to, source)
    return made if made.passes(other, now) else None


class Internet:
    """Gives machines their addresses: site N has the host 45.N, and its machines have 192.168.1.10 and so
    on."""

    def __init__(self) -> None:
        self._sites = 0
        self._filling: dict[tuple[Preset, int], tuple[RoutedSite, int]] = {}

    def machine(self, peer: PeerId, number: int, preset: Preset, behind_one: int) -> RoutedMachine:
        """Return the machine of the peer with this number."""
        has_ipv6 = preset in HAS_IPV6
        inner6 = (f"2a0f:{number // 65_536 + 1:x}:{number % 65_536:x}::1", PORT)
        if preset == "none":
            place = number + 1
            inner = (f"46.{place >> 16 & 255}.{place >> 8 & 255}.{place & 255}", PORT)
            return RoutedMachine(peer, {4: Card(inner), 6: Card(inner6)})
        site, count = self._filling.get((preset, behind_one), (None, 0))
        if site is None or count >= behind_one:
            site, count = self._site(preset), 0
        self._filling[preset, behind_one] = site, count + 1
        cards = {4: Card((f"192.168.1.{10 + count}", PORT), site)}
        if has_ipv6:
            cards[6] = Card(inner6, RoutedSite(preset, (FIREWALL,), ("",)))
        return RoutedMachine(peer, cards)

    def _site(self, preset: Preset) -> RoutedSite:
        self._sites += 1
        hosts = [f"45.{self._sites >> 8 & 255}.{self._sites & 255}.2"]
        translations = PRESETS[preset]
        if len(translations) > 1:
            hosts.insert(0, f"100.64.{self._sites >> 8 & 255}.{self._sites & 255}")
        return RoutedSite(preset, translations, hosts)
