"""The gossip timer: in each interval, while facts are queued, a few random members receive them (as in
memberlist).

`gossip.dissemination` decides which facts are sent, and how many times.
"""

from crypto.facts import Fact
from gossip.member import Status
from gossip.messages import Gossip
from gossip.push_pull import Sends as Sends
from gossip.settings import SwimSettings
from gossip.state_table import MembershipState


class GossipRounds:
    """The gossip rounds of one core. The next one is at `due`, in monotonic seconds; inf if no facts are
    queued."""

    __slots__ = ("_beliefs", "_settings", "_table", "due")

    def __init__(self, beliefs: MembershipState, settings: SwimSettings) -> None:
        self._beliefs = beliefs
        self._table = beliefs.table
        self._settings = settings
        self.due = float("inf")

    def arm(self, now: float) -> None:
        """Schedule a round, if there are facts and members to receive them."""
        if self.due == float("inf") and self._beliefs.queue.waits and self._table.others:
            self.due = now + self._settings.gossip_interval_seconds

    def send(self, now: float) -> Sends:
        """Send the facts to a few members, including recently dead ones, which may still be alive."""
        self.due = float("inf")
        fresh = now - self._settings.gossip_to_dead_seconds
        listeners = self._table.pick(
            self._settings.gossip_fanout,
            lambda row: row.live or (row.status is Status.DEAD and row.since > fresh),
        )
        news = [(peer, self._beliefs.facts_for(peer)) for peer in listeners if self._beliefs.queue.waits]
        return [(peer, Gossip(facts)) for peer, facts in news if facts]

    def say_goodbye(self, fact: Fact) -> Sends:
        """Send a fact immediately, to as many members as it would otherwise be passed on to."""
        count = self._settings.retransmits(self._table.live)
        return [(peer, Gossip((fact,))) for peer in self._table.pick(count, lambda row: row.live)]
