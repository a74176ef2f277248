"""Lives of one key: those of this peer's own beside this one, and those of members that newer ones displaced.

A life is one start of a process. Its alive facts have its name (`gossip.messages.life_of`) and, once it has
heard of another, that one's. A life of long ago cannot name one that began later: so a fact that names this
life proves that its author lives now, as a copied data folder makes it. Of two the greater name, which began
later, is silent from then on; whoever drives its core ends it. The elder announces itself again once the
other has ended.

A member holds one alive fact of each peer, the newest. It also keeps those of a few lives before, and for a
while it tells them to whichever process answers as that peer: a copy hears of its original in this way. A
process that was started again hears of its own past, where nobody is any more.
"""

from math import inf

from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.member import OtherLifeHeard, RivalFound
from gossip.messages import LIFE_BYTES, AliveBody, AliveFact, Body, read_alive, read_body, started_of

LIVES_MAX = 16
"""Other lives that are remembered, the latest heard: each start of a copy is another one."""
AGAIN_SECONDS = (1.0, 2.0)
"""Pauses before the elder announces itself again. The younger goes on for 0.6 s after it has met the elder,
and may take others' sessions meanwhile; under load its process takes longer to end."""
AGAIN_LISTENERS_MAX = 32
"""Members that hear each of these announcements from the elder itself."""
DISPLACED_MAX = 64
"""Members of which displaced lives are kept."""
DISPLACED_LIVES_MAX = 4
"""Displaced lives of one member, the latest. An original displaces each copy, and so stays among them."""
TOLD_INTERVALS = 10
"""Probe intervals for which displaced lives are told: any one message may be lost, or go to the wrong
process."""


class OtherLives:
    """Other lives of this peer's own key. `life` is this one; `again_at` is when it is to be announced again,
    as the elder of two, inf for never."""

    __slots__ = ("_heard", "_pauses", "_rivals", "again_at", "is_silent", "life")

    def __init__(self, life: bytes) -> None:
        self.life = life
        self.is_silent = False
        """Whether an older life of this key is beside this one, which has to go."""
        self.again_at = inf
        self._pauses: tuple[float, ...] = ()
        self._heard: dict[bytes, None] = {}
        self._rivals: dict[bytes, None] = {}

    def is_other(self, body: Body) -> bool:
        """Return whether an own fact is of another life; one without a name is of an older version."""
        return isinstance(body, AliveBody) and len(body.life) == LIFE_BYTES and body.life != self.life

    def is_new(self, body: AliveBody) -> bool:
        """Return whether `hear` would tell of it."""
        return self.is_other(body) and body.life not in self._heard

    def hear(self, fact: Fact, body: AliveBody) -> OtherLifeHeard:
        """Take in the first fact of another life, which was checked."""
        _remember(self._heard, body.life)
        return OtherLifeHeard(read_alive(fact, body).profile.addresses)

    def is_rival(self, body: Body) -> bool:
        """Return whether a fact proves that another life is beside this one, and that is news."""
        if not isinstance(body, AliveBody) or not self.is_other(body) or body.rival != self.life:
            return False
        return body.life not in self._rivals

    def is_outlived(self, body: Body) -> bool:
        """Return whether a fact is of a younger life that was met."""
        return isinstance(body, AliveBody) and body.life in self._rivals and body.life > self.life

    def meet(self, life: bytes) -> bool:
        """Take in that another life is beside this one. Return whether this one is the elder."""
        _remember(self._rivals, life)
        is_elder = life > self.life
        self.is_silent = self.is_silent or not is_elder
        return is_elder

    def outlive(self, now: float) -> None:
        """Plan to announce this life again, and then once more."""
        self._pauses = AGAIN_SECONDS
        self.next_announcement(now)

    def next_announcement(self, now: float) -> None:
        """Plan the next of the announcements that are left."""
        self.again_at = now + self._pauses[0] if self._pauses else inf
        self._pauses = self._pauses[1:]

    def found(self, fact: Fact, body: AliveBody) -> RivalFound:
        """Return what tells of the life that a fact is of."""
        profile = read_alive(fact, body).profile
        return RivalFound(started_of(body.life), profile.name, profile.addresses, body.life > self.life)


def _remember(lives: dict[bytes, None], life: bytes) -> None:
    lives[life] = lives.pop(life, None)
    if len(lives) > LIVES_MAX:
        del lives[next(iter(lives))]


class DisplacedLives:
    """Facts of members' lives that were displaced by newer ones, and for how long they are told."""

    __slots__ = ("_facts", "_left", "_turn", "met")

    def __init__(self) -> None:
        self._facts: dict[PeerId, dict[bytes, Fact]] = {}
        # Probe intervals for which those of a peer are told.
        self._left: dict[PeerId, int] = {}
        self._turn = 0
        self.met: dict[PeerId, None] = {}
        """Those of them that have spoken to this peer itself: it writes to them. Others are told where there
        is a message for them anyway, or each life would hear from a whole swarm."""

    @property
    def waits(self) -> bool:
        """Whether anything is to be told to anybody."""
        return bool(self._left)

    def note(self, held: AliveFact, said: AliveFact, *, speaks: bool) -> None:
        """A member speaks in another life than in the fact that is held of it, or in the same: to this peer
        itself, or by others."""
        before, now = read_body(held.fact), read_body(said.fact)
        if not (isinstance(before, AliveBody) and isinstance(now, AliveBody)) or before.life == now.life:
            return
        facts = self._facts.pop(said.peer, {})
        for life in (before.life, now.life):
            facts.pop(life, None)
        facts[before.life] = held.fact
        if len(facts) > DISPLACED_LIVES_MAX:
            del facts[next(iter(facts))]
        self._facts[said.peer] = facts
        self._left[said.peer] = TOLD_INTERVALS
        if speaks:
            self.met[said.peer] = None
        if len(self._facts) > DISPLACED_MAX:
            self.forget(next(iter(self._facts)))

    def of(self, peer: PeerId) -> tuple[Fact, ...]:
        """Return all that is to be told to `peer`; nothing as a rule."""
        return tuple(self._facts[peer].values()) if peer in self._left else ()

    def next(self, held: AliveFact) -> Fact | None:
        """Return one fact for a message to a peer of which `held` is held: each of its lives in turn, for it
        is not known which of them will read it."""
        facts = self.of(held.peer)
        if not facts:
            return None
        self._turn += 1
        return (*facts, held.fact)[self._turn % (len(facts) + 1)]

    def next_interval(self) -> None:
        """A probe interval has begun."""
        if self._left:
            self._left = {peer: left - 1 for peer, left in self._left.items() if left > 1}
            self.met = {peer: None for peer in self.met if peer in self._left}

    def forget(self, peer: PeerId) -> None:
        """Drop what is kept of `peer`."""
        self._facts.pop(peer, None)
        self._left.pop(peer, None)
        self.met.pop(peer, None)
