"""The seat of a held stage: the one head that the stage works for, and the rules for replacing that head.

Not here: the head's side (`partition.run.local.column`), and when a state is too old for a head
(`partition.run.local.holder`).
"""

from collections.abc import Callable, Sequence

from crypto.identity import PeerId
from crypto.registers import Budget, Register, Silence

CALL_SECONDS_MAX = 60.0
"""Time limit for an answer of a holder; after it, the head gives up the holder."""
HEAD_PATIENCE_SECONDS = CALL_SECONDS_MAX
"""How long a head may be silent before it loses its holder to another head that wants the holder. It is
longer than a round of averaging between two steps."""
BEGINNING_SECONDS = 10.0
"""The same for a head that has made no step yet. It may be looking for holders of its other stages."""
HEAD_SECONDS_MAX = 300.0
"""How long a head may be silent before it loses its holder even if no other head wants the holder, because a
holder with a head does not look for another."""
HEADS = Budget(1, 1, 1, HEAD_PATIENCE_SECONDS, BEGINNING_SECONDS, BEGINNING_SECONDS)


class SeatedHead:
    """A present or former head of a stage. `let_go` is called when another head replaces it."""

    def __init__(self, peer: PeerId, let_go: Callable[[], None]) -> None:
        self.peer = peer
        self.silence = Silence()
        self.let_go = let_go

    @property
    def silent_since(self) -> float:
        return self.silence.since


class StageSeat:
    """The heads of one held stage, one at a time: on other nodes (`take`), or this node itself
    (`work_here`)."""

    def __init__(self, number: int) -> None:
        """`number` is the stage's number."""
        self.number = number
        self.head: PeerId | None = None
        self.failure = ""
        """The reason why the stage has failed; empty if it has not."""
        self.last_head: PeerId | None = None
        """The latest head, possibly gone."""
        self.companions: list[PeerId] = []
        """The other nodes of the latest head's column."""
        self.keeps_copies = False
        """Whether the latest head has asked this holder to keep copies of the head's stage."""
        self._heads: Register[SeatedHead] = Register(HEADS)
        self._seated: SeatedHead | None = None

    def take(
        self, now: float, head: SeatedHead, *, keeps_copies: bool = False, column: Sequence[PeerId] = ()
    ) -> bool:
        """Seat a head; return whether it gets the seat. It replaces an earlier stream of the same head, and
        another head that has been silent for too long."""
        if self._seated is not None and self._seated.peer == head.peer:
            self._unseat(self._seated)
        evicted = self._heads.admit(now, head, head.peer, head.peer)
        if evicted is None:
            return False
        for each in evicted:
            self._unseat(each)
        self._seated, self.head = head, head.peer
        self.last_head, self.keeps_copies = head.peer, keeps_copies
        self.companions = list(column)
        return True

    def leave(self, head: SeatedHead) -> bool:
        """Note that a head is gone; return whether the stage has no head now."""
        self._heads.leave(head)
        if head is not self._seated:
            return False
        self._seated = self.head = None
        return True

    def stepped(self, head: SeatedHead) -> None:
        """Note a step of a head. The head may be silent for longer from now on."""
        self._heads.credit(head)

    def expel(self, peer: PeerId) -> None:
        """Stop working for a peer that is no longer a member."""
        if self._seated is not None and self._seated.peer == peer:
            self._unseat(self._seated)

    def close(self) -> None:
        """Stop working for the head."""
        if self._seated is not None:
            self._seated.let_go()

    @property
    def is_vacant(self) -> bool:
        """Whether no other node is the head."""
        return self._seated is None

    def work_here(self, me: PeerId) -> None:
        """Start to work for this node itself."""
        self.head = me

    def rest(self) -> None:
        """Stop working for this node itself."""
        self.head = None

    def _unseat(self, head: SeatedHead) -> None:
        self._heads.leave(head)
        head.let_go()
