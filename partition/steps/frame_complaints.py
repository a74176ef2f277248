"""Complaints of members about unusable frames of others. No member is believed alone.

A BadFrame proves that its author sent a frame with that header, not what came beside it: the author may have
sent an unusable payload, or the accuser may lie. So the micro-batch goes elsewhere, both are noted, and

    who is in dispute with two others   loses its place: of a liar and its victims, or of a faulty author and
                                        those it sends to, only the one has two opponents
    two who still dispute in a third    both lose their places, and so where the micro-batch can go nowhere
    step                                else

But where a trainer's frame came as it was sent and holds a number that the model does not take, and the
committer would have sent the same, the fault is the data's: as soon as two say so, or one where nobody else
can compute it.

A lone liar costs no honest peer its place without losing its own. Several that agree are believed, as in
votes. Pure bookkeeping of one committer; a new plan begins with a clean slate.
"""

from collections.abc import Mapping, Sequence

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.assignment import feeder_of
from partition.plan.plan import Plan, plan_hash
from partition.steps.frames import FrameHeader, read_header
from partition.steps.ledger import Ledger, Place
from partition.steps.messages import BadFrame
from partition.steps.routes import check_frame

USELESS = "it sent what cannot be used, or says so of others"
OPPONENTS_MAX = 1
"""With more opponents than this, a peer is at fault itself."""
STEPS_MAX = 2
"""A bit may turn on the way from a tensor to its digest; two steps show how both do with others."""


class FrameComplaints:
    """The complaints about frames of one plan, as its committer `me` hears of them."""

    def __init__(self, me: PeerId, plan: Plan, places: Mapping[PeerId, Place]) -> None:
        self._me = me
        self._plan = plan
        self._places = places
        self._opponents: dict[PeerId, dict[PeerId, set[tuple[int, int]]]] = {}
        self._judged: set[PeerId] = set()

    def read(
        self, message: BadFrame, ledger: Ledger, place: Place, step: int
    ) -> tuple[FrameHeader, PeerId] | None:
        """Return the header that a replica cannot use, and its author; None where it no longer computes that
        micro-batch.

        Raises RemoteProtocolError: there can be no such frame.
        """
        header, author = read_header(message.frame), PeerId(message.frame.author)
        if header.plan != plan_hash(self._plan):
            raise RemoteProtocolError("a frame of another plan is said to be of no use")
        if header.step != step or header.train != ledger.train:
            return None
        check_frame(self._plan, place[0], step, author, header)
        is_owed = header.microbatch in ledger.numbers and ledger.owes(place, header.microbatch)
        return (header, author) if is_owed else None

    def settle(
        self,
        ledger: Ledger,
        rates: Sequence[Sequence[int]],
        accuser: PeerId,
        author: PeerId,
        header: FrameHeader,
        *,
        follows_data: bool = False,
    ) -> tuple[bool, list[PeerId], bool]:
        """Settle a complaint of `accuser` about a frame of `author`; `follows_data`: it is about a number
        that is in the committer's own data too.

        Return whether the micro-batch has another owner in one of the stages now, the peers that lose their
        place, and whether only the data is at fault.
        """
        accusers = {accuser, *self._opponents.get(author, ())}
        is_judged = not self._judged.isdisjoint((accuser, author))
        guilty = [] if is_judged else self._note(header, accuser, author)
        is_moved = False
        made_by = self._maker(author, header)
        if made_by is None:
            is_due = author == feeder_of(self._plan, header.train, header.microbatch)
        else:
            is_due = ledger.owns(made_by, header.microbatch)
        if is_due:  # otherwise the sender's own complaint is still to come
            places = [self._places[accuser], *([] if made_by is None else [made_by])]
            if len(self._opponents.get(accuser, {}).get(author, ())) % 2 == 0:
                places.reverse()
            # Another receiver may be able to use it; of another author the accuser may. Now the one, now the
            # other is tried first, since a peer that cannot agree with two others is wrong.
            is_moved = any(ledger.pass_on(place, header.microbatch, rates) for place in places)
            if not (is_moved or guilty or is_judged):
                guilty = [peer for peer in (accuser, author) if peer != self._me]
        is_sound = follows_data and made_by is None and is_due
        if is_sound and (len(accusers) > OPPONENTS_MAX or not is_moved):
            return is_moved, [], True
        guilty = [peer for peer in guilty if not (is_sound and peer == author)]
        self._judged.update(guilty)
        return is_moved, guilty, False

    def _note(self, header: FrameHeader, accuser: PeerId, author: PeerId) -> list[PeerId]:
        if accuser == author:
            return [author]
        for one, other in ((accuser, author), (author, accuser)):
            row = self._opponents.setdefault(one, {}).setdefault(other, set())
            row.add((header.step, header.microbatch))
        guilty = [peer for peer in (author, accuser) if len(self._opponents[peer]) > OPPONENTS_MAX]
        if not guilty and len({step for step, _ in self._opponents[author][accuser]}) > STEPS_MAX:
            guilty = [author, accuser]
        for peer in guilty:
            for opponent in self._opponents.pop(peer):
                # Its complaints count no more, nor complaints about it.
                self._opponents.get(opponent, {}).pop(peer, None)
        return guilty

    def _maker(self, author: PeerId, header: FrameHeader) -> Place | None:
        """Return the replica that made this frame; None for a trainer's."""
        is_fed = header.direction == "labels" or (header.direction == "input" and header.stage == 0)
        return None if is_fed else self._places[author]
