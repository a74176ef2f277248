"""The settings for using relays: what each does, how it is bounded by other settings, and a good value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RelaySettings:
    """How a node finds relays and keeps places at them. Raises ValueError if settings contradict each
    other."""

    refused_seconds: float = 60.0
    """How long a relay that refused, or failed, is left alone. Default: 60."""

    lost_seconds: float = 0.5
    """How long a relay is left alone after an established place there was lost. A relay that hangs up early
    may do so on purpose, so each further early loss makes the pause four times as long, up to
    `refused_seconds`. Default: 0.5."""

    stood_seconds: float = 60.0
    """Least age at which a place counts as established. An earlier loss counts against the relay. Default:
    60."""

    publish_look_seconds: float = 10.0
    """Seconds between checks whether this node should be listed as a relay in the DHT. At most the 20 minutes
    between two announcements. Default: 10."""

    look_seconds: float = 1.0
    """Seconds between checks whether the node needs relays from the DHT. At most `search_seconds`. Default:
    1."""

    search_seconds: float = 15.0
    """First pause between searches while more relays are wanted; it doubles after each search. Default:
    15."""

    search_seconds_max: float = 600.0
    """Longest pause between searches. At least the first pause. Default: 600."""

    def __post_init__(self) -> None:
        bounds = (
            (
                0 < self.lost_seconds <= self.refused_seconds,
                "0 < lost_seconds <= refused_seconds",
            ),
            (self.stood_seconds >= 0, "stood_seconds at least 0"),
            (0 < self.publish_look_seconds <= 1_200, "publish_look_seconds at most 1,200"),
            (0 < self.look_seconds <= self.search_seconds, "look_seconds above 0 and at most search_seconds"),
            (self.search_seconds <= self.search_seconds_max, "search_seconds at most search_seconds_max"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"relay settings: {rule}")


RELAYS = RelaySettings()
"""The usual settings."""
