"""Decides whether this machine may serve others now, and why not. A pure function of readings and the owner's
rules, with hysteresis.

Missing readings are None: a rule that needs one is reported and not applied. A refusal takes effect
immediately, a permission only after CALM_SECONDS.
"""

from dataclasses import dataclass

from node.offering import Offering

CALM_SECONDS = 60.0
"""How long the rules must allow serving before it is permitted again. A pause between two keystrokes, or
while a program waits, is not enough."""
HOURS, BATTERY, IN_USE, LOADED, METERED = RESTING = ("hours", "battery", "in use", "loaded", "metered")
"""Words with which members announce why they serve nobody now
(`node.services.metadata.AdvertisedStanding`)."""
LOOK_SECONDS = 2.0
"""Seconds between two readings. The owner has the machine back within ten seconds, of which leaving takes
eight."""


@dataclass(frozen=True)
class Reading:
    """The state of a machine now. `minute` is that of its owner's day. `idle_seconds` is the time since the
    last input by a person. `load_percent` is the share of all cores used by programs other than this node.
    `on_mains`: whether it has mains power. `battery_percent` is the remaining charge of its batteries."""

    minute: int
    idle_seconds: float | None = None
    load_percent: float | None = None
    on_mains: bool | None = None
    battery_percent: float | None = None


@dataclass(frozen=True)
class Permission:
    """Whether the machine serves others. If not, `reason` is a text for people, and `word` is one of RESTING
    for other members. `unread` are rules that cannot be applied here. `sends_less` is the reason for sending
    less often, as a text for people; empty if it does not."""

    may_serve: bool = True
    reason: str = ""
    unread: tuple[str, ...] = ()
    word: str = ""
    sends_less: str = ""


class MachinePermission:
    """The permission of one machine over time."""

    def __init__(self) -> None:
        self.now = Permission()
        self._fine_since: float | None = None
        self._has_looked = False

    def look(self, now: float, rules: Offering, reading: Reading) -> Permission:
        """Apply a reading at monotonic time `now`; return the permission from now on."""
        (word, reason), unread = refusal(rules, reading), unread_rules(rules, reading)
        less = why_less(rules, reading)
        if reason:
            self._fine_since = None
            self.now = Permission(may_serve=False, reason=reason, unread=unread, word=word, sends_less=less)
        elif self.now.may_serve or not self._has_looked:
            self.now = Permission(unread=unread, sends_less=less)
        else:
            self._fine_since = now if self._fine_since is None else self._fine_since
            if now - self._fine_since >= CALM_SECONDS:
                self.now = Permission(unread=unread, sends_less=less)
        self._has_looked = True
        return self.now

    def reset(self) -> None:
        """Forget earlier readings, because the owner has changed the rules."""
        self.now, self._fine_since, self._has_looked = Permission(), None, False


def refusal(rules: Offering, reading: Reading) -> tuple[str, str]:
    """Return why the rules forbid serving at this reading, as one of RESTING and as a text for people; two
    empty texts if they allow it."""
    if not rules.hours.holds(reading.minute):
        again = rules.hours.next_begin(reading.minute)
        return HOURS, f"serves at {rules.hours} only, again at {again // 60:02d}:{again % 60:02d}"
    if rules.mains_only and reading.on_mains is False:
        return BATTERY, "on battery"
    if (low := _low_battery(rules, reading)) and rules.battery_low == "never":
        return BATTERY, low
    if rules.metered == "never":
        return METERED, "its link is metered"
    if rules.idle_seconds and reading.idle_seconds is not None and reading.idle_seconds < rules.idle_seconds:
        return IN_USE, "its owner uses it"
    if rules.load_percent and reading.load_percent is not None and reading.load_percent > rules.load_percent:
        return LOADED, f"other programs take more than {rules.load_percent} % of it"
    return "", ""


def why_less(rules: Offering, reading: Reading) -> str:
    """Return why the machine should send less often, as a text for people; empty if it should not."""
    return _low_battery(rules, reading) or ("" if rules.metered == "no" else "its link is metered")


def _low_battery(rules: Offering, reading: Reading) -> str:
    charge = reading.battery_percent
    if reading.on_mains is not False or charge is None or charge >= rules.battery_min_percent:
        return ""
    return f"on battery with less than {rules.battery_min_percent} % left"


def unread_rules(rules: Offering, reading: Reading) -> tuple[str, ...]:
    """Return the rules that the owner has set but this machine cannot measure."""
    wanted = (
        ("idle", rules.idle_seconds > 0, reading.idle_seconds is None),
        ("load", rules.load_percent > 0, reading.load_percent is None),
        ("mains_only", rules.mains_only, reading.on_mains is None),
        (
            "battery_min",
            rules.battery_min_percent > 0,
            reading.battery_percent is None and reading.on_mains is not True,
        ),
    )
    return tuple(name for name, is_set, is_unread in wanted if is_set and is_unread)
