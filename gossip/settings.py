"""The settings of SWIM: what each does, its bounds against its siblings, a good value.

Four presets: `local` and `host` for nodes on one machine, `lan` (memberlist's values), `wan`. Times of
memberlist: hashicorp/memberlist `config.go`; the two suspicion multipliers: Lifeguard (Dadgar,
Phillips and Currey 2018), section IV-B.
"""

import math
from dataclasses import dataclass, replace

from gossip.messages import FACT_BYTES_MAX, MEMBERS_MAX


@dataclass(frozen=True)
class SwimSettings:
    """The settings of one SWIM core. Raises ValueError where they contradict each other."""

    probe_interval_seconds: float = 1.0
    """One member is probed each interval. Must exceed twice the timeout, so that relays can answer. 1."""

    probe_timeout_seconds: float = 0.45
    """An unanswered ping is followed by indirect ones after this. Above the usual round trip's 99th
    percentile. 0.45: memberlist's 0.5 less the room a relay needs within the interval of 1."""

    probe_timeout_max_seconds: float = 2.0
    """A member that answers more slowly, as measured, has its probes stretched until they wait for this long
    (`gossip.round_trips`). At least the timeout; equal to it, nothing is stretched. 2: two satellite hops."""

    indirect_probes: int = 3
    """How many others are asked to ping a silent member. 0 trusts every lossy path; 3 is plenty."""

    suspicion_multiplier: float = 4.0
    """A suspicion confirmed by others lasts multiplier * max(1, log10(members)) probe intervals. Long
    enough for gossip to reach the suspect and its refutation to come back; at least 2. 4."""

    suspicion_max_multiplier: float = 6.0
    """A suspicion nobody confirms lasts this many times longer; 1 turns Lifeguard's timing off. 6."""

    confirmations: int = 2
    """Independent accusers, besides the first, that bring a suspicion down to its shortest. At most
    8. In a swarm too small to have them the shortest time applies at once. 2."""

    retransmit_multiplier: int = 4
    """A fact is passed on multiplier * ceil(log10(members + 1)) times by each member. 4."""

    gossip_interval_seconds: float = 0.2
    """How often waiting facts are sent on their own, beside those that ride on probes. At most the
    probe interval. Nothing is sent where nothing waits. 0.2."""

    gossip_fanout: int = 3
    """The number of members each time; at least 1. 3."""

    gossip_to_dead_seconds: float = 30.0
    """How long the newly dead still get gossip, so that a falsely accused member learns of it. At most
    `dead_kept_seconds`. 30."""

    sync_interval_seconds: float = 30.0
    """The interval at which another member's list is compared with ours, and exchanged if it differs, give or
    take a quarter; longer above 32 members, as in memberlist. At least the probe interval. 30."""

    dead_kept_seconds: float = 600.0
    """How long the dead and the left stay listed with their reason; also how long an old alive fact
    cannot bring them back. At least ten probe intervals. 600."""

    health_max: int = 7
    """Lifeguard's local health: a peer whose own probes fail slows down up to 1 + this many times. 0
    turns it off, 7 is the paper's."""

    stall_seconds: float = 0.2
    """A wake this late means that this machine stalled: answers may lie unread, so open probes and
    suspicions get the lost time back (at most once their own length). Below the probe interval. 0.2."""

    facts_bytes_max: int = 850
    """Facts in a message other than Sync. At least one alive fact (830); with header and seal it must
    fit a datagram of 1,232 bytes. 850."""

    members_max: int = MEMBERS_MAX
    """The most members listed, this peer and the dead included. 2,000."""

    scope_members_min: int = 200
    """In a swarm of neighbourhoods, a peer with fewer live members than this doubles its scope. Enough that
    chance does not empty a neighbourhood. 200."""

    scope_members_max: int = 600
    """With more than this it halves its scope. At least three times the least, or the depth would oscillate.
    600: 100 kB of member list."""

    def __post_init__(self) -> None:
        bounds = (
            (0 < 2 * self.probe_timeout_seconds < self.probe_interval_seconds, "0 < 2 * timeout < interval"),
            (self.probe_timeout_max_seconds >= self.probe_timeout_seconds, "timeout at most its maximum"),
            (0 <= self.indirect_probes <= 16, "indirect_probes is 0-16"),
            (2 <= self.suspicion_multiplier <= 100, "suspicion_multiplier is 2-100"),
            (1 <= self.suspicion_max_multiplier <= 100, "suspicion_max_multiplier is 1-100"),
            (0 <= self.confirmations <= 8, "confirmations is 0-8"),
            (1 <= self.retransmit_multiplier <= 16, "retransmit_multiplier is 1-16"),
            (0 < self.gossip_interval_seconds <= self.probe_interval_seconds, "gossip at least each probe"),
            (1 <= self.gossip_fanout <= 16, "gossip_fanout is 1-16"),
            (0 <= self.gossip_to_dead_seconds <= self.dead_kept_seconds, "gossip to the dead while kept"),
            (self.sync_interval_seconds >= self.probe_interval_seconds, "sync at most each probe"),
            (self.dead_kept_seconds >= 10 * self.probe_interval_seconds, "the dead kept ten probes"),
            (0 <= self.health_max <= 7, "health_max is 0-7"),
            (0 < self.stall_seconds < self.probe_interval_seconds, "stall_seconds below the interval"),
            (FACT_BYTES_MAX <= self.facts_bytes_max <= 1_100, f"facts_bytes_max is {FACT_BYTES_MAX}-1100"),
            (2 <= self.members_max <= MEMBERS_MAX, f"members_max is 2-{MEMBERS_MAX}"),
            (1 <= 3 * self.scope_members_min <= self.scope_members_max, "a scope's bounds differ threefold"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"SWIM settings: {rule}")

    @classmethod
    def local(cls) -> "SwimSettings":
        """Nodes on one machine: a death is noticed in 1-2 s, a stall of 0.7 s is not a death.

        A member is dead once it misses a probe (0.2 s) and does not refute for at least another 1.0 s. So a
        process that is frozen for 3 s, by a debugger or a laptop's lid, is dead: this preset decides by
        silence alone. `host` survives that.
        """
        return cls(
            probe_interval_seconds=0.2,
            probe_timeout_seconds=0.08,
            probe_timeout_max_seconds=0.08,
            suspicion_multiplier=5.0,
            suspicion_max_multiplier=1.6,
            gossip_interval_seconds=0.05,
            sync_interval_seconds=5.0,
            stall_seconds=0.05,
        )

    @classmethod
    def host(cls) -> "SwimSettings":
        """Nodes on one machine, which may stall for 3 s: `local` with a suspicion of 3.6 s at least.

        A process that has ended is still noticed in 1-2 s, since its machine reports its port as closed
        (`Swim.hint_closed`); one that stays silent with an open port in 4 to 8 s.
        """
        return replace(cls.local(), suspicion_multiplier=18.0)

    @classmethod
    def lan(cls) -> "SwimSettings":
        """One building or data centre: memberlist's values, which are the defaults."""
        return cls()

    @classmethod
    def wan(cls) -> "SwimSettings":
        """The open internet: slow links, and slower detection."""
        return cls(
            probe_interval_seconds=5.0,
            probe_timeout_seconds=2.0,
            probe_timeout_max_seconds=4.0,
            suspicion_multiplier=6.0,
            gossip_interval_seconds=0.5,
            gossip_fanout=4,
            gossip_to_dead_seconds=60.0,
            sync_interval_seconds=60.0,
            stall_seconds=1.0,
        )

    def retransmits(self, live: int) -> int:
        """How often each member passes on a fact, among `live` members."""
        return self.retransmit_multiplier * math.ceil(math.log10(live + 1))

    def sync_period_seconds(self, live: int) -> float:
        """memberlist's pushPullScale: doubled above 32 members, tripled above 64, and so on."""
        return self.sync_interval_seconds * (1 + max(0, math.ceil(math.log2(max(live, 1)) - 5)))

    def suspicion_bounds_seconds(self, live: int) -> tuple[float, float]:
        """The shortest and the longest suspicion among `live` members."""
        shortest = (
            self.suspicion_multiplier * max(1.0, math.log10(max(live, 1))) * self.probe_interval_seconds
        )
        return shortest, shortest * self.suspicion_max_multiplier


PRESETS = {
    "local": SwimSettings.local(),
    "host": SwimSettings.host(),
    "lan": SwimSettings.lan(),
    "wan": SwimSettings.wan(),
}
"""The presets by the name a config file uses."""
