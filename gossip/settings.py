"""The settings of SWIM: what each does, its limits relative to the others, and a good value.

There are four presets: `local` and `host` for nodes on one machine, `lan` (memberlist's values), `wan`. The
times come from hashicorp/memberlist `config.go`, the two suspicion multipliers from Lifeguard (Dadgar,
Phillips and Currey 2018), section IV-B.
"""

import math
from dataclasses import dataclass, replace

from gossip.messages import FACT_BYTES_MAX, MEMBERS_MAX


@dataclass(frozen=True)
class SwimSettings:
    """The settings of one SWIM core. Raises ValueError if they contradict each other."""

    probe_interval_seconds: float = 1.0
    """Seconds between two probes, each of one member. Must exceed twice the timeout, so that relays can
    answer. Default: 1."""

    probe_timeout_seconds: float = 0.45
    """Seconds after which an unanswered ping is followed by indirect ones. Must be above the usual round
    trip's 99th percentile. 0.45: memberlist's 0.5 less the room a relay needs within the interval of 1."""

    probe_timeout_max_seconds: float = 2.0
    """The probes of a member that is measured to answer more slowly are stretched, up to this timeout
    (`gossip.round_trips`). At least the timeout; if equal, nothing is stretched. 2: two satellite hops."""

    indirect_probes: int = 3
    """Number of others that are asked to ping a silent member. 0 makes every lost packet count; 3 is
    plenty."""

    suspicion_multiplier: float = 4.0
    """A suspicion confirmed by others lasts multiplier * max(1, log10(members)) probe intervals. This must
    be long enough for gossip to reach the suspect and for its refutation to come back; at least 2.
    Default: 4."""

    suspicion_max_multiplier: float = 6.0
    """A suspicion that no other member confirms lasts this many times longer; 1 turns Lifeguard's timing off.
    6."""

    confirmations: int = 2
    """Number of independent accusers, in addition to the first, that shorten a suspicion to its minimum; at
    most 8. In a swarm that is too small to have them, the minimum applies immediately. Default: 2."""

    retransmit_multiplier: int = 4
    """Each member passes a fact on multiplier * ceil(log10(members + 1)) times. Default: 4."""

    gossip_interval_seconds: float = 0.2
    """Seconds between sends of queued facts in messages of their own, in addition to those that travel with
    probes. At most the probe interval. If no fact is queued, nothing is sent. Default: 0.2."""

    gossip_fanout: int = 3
    """Number of members that receive facts each time; at least 1. Default: 3."""

    gossip_to_dead_seconds: float = 30.0
    """How long newly dead members still get gossip, so that a falsely accused member learns of it. At most
    `dead_kept_seconds`. Default: 30."""

    sync_interval_seconds: float = 30.0
    """Average interval at which our list is compared with another member's, and exchanged if they differ. It
    varies by up to a quarter, and is longer above 32 members, as in memberlist. At least the probe interval.
    30."""

    dead_kept_seconds: float = 600.0
    """How long members that died or left stay listed with their reason. During this time, an old alive fact
    cannot bring them back. At least ten probe intervals. Default: 600."""

    health_max: int = 7
    """Lifeguard's local health: a peer whose own probes fail slows down by a factor of up to 1 + this number.
    0 turns this off; 7 is the paper's value."""

    stall_seconds: float = 0.2
    """If a wake is this late, this machine has stalled and answers may lie unread. So open probes and
    suspicions are extended by the lost time (at most by their own length). Below the probe interval. Default:
    0.2."""

    facts_bytes_max: int = 850
    """Maximum size of the facts in a message other than Sync. At least one alive fact (830); with header and
    seal it must fit into a datagram of 1,232 bytes. Default: 850."""

    members_max: int = MEMBERS_MAX
    """Maximum number of members listed, including this peer and dead members. Default: 2,000."""

    scope_members_min: int = 200
    """If the swarm is divided into neighbourhoods, a peer with fewer live members than this doubles its
    scope. Must be high enough that chance does not empty a neighbourhood. Default: 200."""

    scope_members_max: int = 600
    """A peer with more live members than this halves its scope. At least three times the minimum, or the
    depth would oscillate. 600: 100 kB of member list."""

    def __post_init__(self) -> None:
        bounds = (
            (0 < 2 * self.probe_timeout_seconds < self.probe_interval_seconds, "0 < 2 * timeout < interval"),
            (
                self.probe_timeout_max_seconds >= self.probe_timeout_seconds,
                ("probe_timeout_max_seconds >= probe_timeout_seconds"),
            ),
            (0 <= self.indirect_probes <= 16, "indirect_probes is 0-16"),
            (2 <= self.suspicion_multiplier <= 100, "suspicion_multiplier is 2-100"),
            (1 <= self.suspicion_max_multiplier <= 100, "suspicion_max_multiplier is 1-100"),
            (0 <= self.confirmations <= 8, "confirmations is 0-8"),
            (1 <= self.retransmit_multiplier <= 16, "retransmit_multiplier is 1-16"),
            (
                0 < self.gossip_interval_seconds <= self.probe_interval_seconds,
                ("0 < gossip_interval_seconds <= probe_interval_seconds"),
            ),
            (1 <= self.gossip_fanout <= 16, "gossip_fanout is 1-16"),
            (
                0 <= self.gossip_to_dead_seconds <= self.dead_kept_seconds,
                ("gossip_to_dead_seconds <= dead_kept_seconds"),
            ),
            (
                self.sync_interval_seconds >= self.probe_interval_seconds,
                ("sync_interval_seconds >= probe_interval_seconds"),
            ),
            (
                self.dead_kept_seconds >= 10 * self.probe_interval_seconds,
                ("dead_kept_seconds >= 10 * probe_interval_seconds"),
            ),
            (0 <= self.health_max <= 7, "health_max is 0-7"),
            (0 < self.stall_seconds < self.probe_interval_seconds, "stall_seconds < probe_interval_seconds"),
            (FACT_BYTES_MAX <= self.facts_bytes_max <= 1_100, f"facts_bytes_max is {FACT_BYTES_MAX}-1100"),
            (2 <= self.members_max <= MEMBERS_MAX, f"members_max is 2-{MEMBERS_MAX}"),
            (
                1 <= 3 * self.scope_members_min <= self.scope_members_max,
                ("scope_members_max >= 3 * scope_members_min"),
            ),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"SWIM settings: {rule}")

    @classmethod
    def local(cls) -> "SwimSettings":
        """Return settings for nodes on one machine: a death is noticed within 1-2 s, and a stall of 0.7 s
        does not count as a death.

        A member is dead once it misses a probe (0.2 s) and does not refute for at least 1.0 s after that. So
        a process that is frozen for 3 s, by a debugger or a laptop's lid, counts as dead: this preset decides
        by silence alone. `host` survives that.
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
        """Return settings for nodes on one machine that may stall for 3 s: `local`, but with a suspicion of
        at least 3.6 s.

        The end of a process is still noticed within 1-2 s, because its machine reports the port as closed
        (`Swim.hint_closed`). A process that stays silent with an open port is noticed within 4 to 8 s.
        """
        return replace(cls.local(), suspicion_multiplier=18.0)

    @classmethod
    def lan(cls) -> "SwimSettings":
        """Return settings for one building or data centre: memberlist's values, which are the defaults."""
        return cls()

    @classmethod
    def wan(cls) -> "SwimSettings":
        """Return settings for the open internet: slow links, and slower detection."""
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
        """Return how often each member passes on a fact, if there are `live` members."""
        return self.retransmit_multiplier * math.ceil(math.log10(live + 1))

    def sync_period_seconds(self, live: int) -> float:
        """Return the sync interval. Like memberlist's pushPullScale, it doubles above 32 members, triples
        above 64, and so on."""
        return self.sync_interval_seconds * (1 + max(0, math.ceil(math.log2(max(live, 1)) - 5)))

    def suspicion_bounds_seconds(self, live: int) -> tuple[float, float]:
        """Return the shortest and the longest duration of a suspicion, if there are `live` members."""
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
"""The presets by the name that a config file uses."""
