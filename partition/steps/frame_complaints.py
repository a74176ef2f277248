"""Complaints of members about unusable frames of other members. No member is believed alone.

A BadFrame proves that its author sent a frame with that header, but not which payload came with it: either
the author sent an unusable payload, or the accuser lies. So the micro-batch is given to another replica, and
the dispute is noted for both. Then:

- A peer in dispute with two others loses its place. A liar has several victims, and a faulty author has
  several receivers, so only the peer at fault gets two opponents.
- Two peers that are still in dispute in a third step both lose their places. So do the two if no other
  replica can take the micro-batch.

There is one exception. If a trainer's frame arrived as it was sent but has a value that the model does not
take, and the committer's own data has the same value, then the data is at fault. This is concluded as soon as
two replicas report it, or one if no other replica can compute the micro-batch.

A single liar costs no honest peer its place without losing its own. Several liars that agree are believed, as
in votes. Pure bookkeeping of one committer; a new plan begins without complaints.
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

USELESS = "it sent an unusable frame, or accuses others falsely"
OPPONENTS_MAX = 1
"""A peer with more opponents than this is itself at fault."""
STEPS_MAX = 2
"""Number of steps in which two peers may be in dispute. A bit may flip between a tensor and its digest; two
steps show how each of the two gets on with others."""


class FrameComplaints:
    """The complaints about frames of one plan, as its committer `me` receives them."""

    def __init__(self, me: PeerId, plan: Plan, places: Mapping[PeerId, Place]) -> None:
        self._me = me
        self._plan = plan
        self._places = places
        self._opponents: dict[PeerId, dict[PeerId, set[tuple[int, int]]]] = {}
        self._judged: set[PeerId] = set()

    def read(
        self, message: BadFrame, ledger: Ledger, place: Place, step: int
    ) -> tuple[FrameHeader, PeerId] | None:
        """Return the header that a replica cannot use, and the frame's author; None if the replica no longer
        computes that micro-batch.

        Raises RemoteProtocolError if there can be no such frame.
        """
        header, author = read_header(message.frame), PeerId(message.frame.author)
        if header.plan != plan_hash(self._plan):
            raise RemoteProtocolError("a complaint is about a frame of another plan")
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
        """Settle a complaint of `accuser` about a frame of `author`. `follows_data`: the complaint is about a
        value that is in the committer's own data too.

        Return whether the micro-batch has a new owner in one of the stages, the peers that lose their place,
        and whether the data alone is at fault.
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
        if is_due:  # otherwise a different peer sends this frame by now
            places = [self._places[accuser], *([] if made_by is None else [made_by])]
            if len(self._opponents.get(accuser, {}).get(author, ())) % 2 == 0:
                places.reverse()
            # Another receiver may be able to use the frame, or the accuser a frame of another author. The two
            # are tried alternately, because a peer that cannot agree with two others is at fault.
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
                # Its own complaints no longer count, nor do complaints about it.
                self._opponents.get(opponent, {}).pop(peer, None)
        return guilty

    def _maker(self, author: PeerId, header: FrameHeader) -> Place | None:
        """Return the replica that made this frame; None if a trainer made it."""
        is_fed = header.direction == "labels" or (header.direction == "input" and header.stage == 0)
        return None if is_fed else self._places[author]
