"""The settings by which a node uses relays: what each does, its bounds against its siblings, a good value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RelaySettings:
    """How a node finds relays and keeps places at them. Raises ValueError where settings contradict."""

    refused_seconds: float = 60.0
    """How long a relay that refused, or failed, is left alone. 60."""

    lost_seconds: float = 0.5
    """The same after the loss of an established place. A relay that hangs up sooner may do so on purpose:
    each further such loss makes the pause four times as long, up to `refused_seconds`. 0.5."""

    stood_seconds: float = 60.0
    """The least age of an established place: an earlier loss counts against the relay. 60."""

    publish_look_seconds: float = 10.0
    """How often a node checks whether to be listed as a relay in the DHT. At most the 20 minutes between two
    announcements. 10."""

    look_seconds: float = 1.0
    """How often a node checks whether it wants relays of the DHT. At most `search_seconds`. 1."""

    search_seconds: float = 15.0
    """The first pause between searches while more relays are wanted; it doubles after each. 15."""

    search_seconds_max: float = 600.0
    """The longest pause between two searches. At least the first pause. 600."""

    def __post_init__(self) -> None:
        bounds = (
            (0 < self.lost_seconds <= self.refused_seconds, "a lost place at most as long as a refusal"),
            (self.stood_seconds >= 0, "stood_seconds at least 0"),
            (0 < self.publish_look_seconds <= 1_200, "publish_look_seconds at most 1,200"),
            (0 < self.look_seconds <= self.search_seconds, "a look at least each search"),
            (self.search_seconds <= self.search_seconds_max, "the first pause at most the longest"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"relay settings: {rule}")


RELAYS = RelaySettings()
"""The usual settings."""
