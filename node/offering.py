"""`[offer]` of the configuration: when this machine serves others, and how many at once.

A frozen value and the readers of its settings; it measures nothing. `node.placement.permission` decides
whether the machine may serve now.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from crypto.identity import PeerId, parse_peer
from node.quantities import read_rate
from node.settings import expanded

SLOTS_MAX = 64
LISTED_MAX = 256
PEER_SESSIONS_MAX = 16
"""Maximum number of sessions that a node serves at once for one peer (`partition.serve.provider`)."""
PEER_TOKENS_MAX = 10**9
DAY_MINUTES = 24 * 60
BANDWIDTH_MIN = 125_000
"""In bytes per second."""
SENDS_LESS = "sends less"
"""The condition that others see of a machine whose link is metered or whose battery is low."""
Metered = Literal["no", "less", "never"]
LowBattery = Literal["less", "never"]


ALL_FOLLOWABLE = "all"
"""Stands for every setting that another key may set."""
FOLLOWABLE = (
    "accept_runs", "battery_low", "battery_min", "cores", "disk", "download", "hours", "idle", "load",
    "mains_only", "memory", "metered", "peer_cache", "peer_sessions", "peer_tokens", "peers", "runs",
    "scratch", "slots", "upload",
)  # fmt: skip
"""Settings that a key may set for the nodes that follow it: limits, hours and offers. They include no
identity, address, key, path or program, and not the choice of the key to follow."""


@dataclass(frozen=True)
class Hours:
    """Times of the day at which a machine serves, as spans in minutes since midnight; no spans means always.
    A span whose end is before its start crosses midnight."""

    spans: tuple[tuple[int, int], ...] = ()

    def holds(self, minute: int) -> bool:
        """Return whether the machine serves at this minute of the day."""
        if not self.spans:
            return True
        return any(
            first <= minute < end if first <= end else minute >= first or minute < end
            for first, end in self.spans
        )

    def next_begin(self, minute: int) -> int:
        """Return the minute of the day at which the first span after this minute begins."""
        return min((first for first, _ in self.spans), key=lambda first: (first - minute - 1) % DAY_MINUTES)

    def __str__(self) -> str:
        return ",".join(
            f"{first // 60:02d}:{first % 60:02d}-{end // 60:02d}:{end % 60:02d}" for first, end in self.spans
        )


@dataclass(frozen=True)
class NamedData:
    """A data set of the owner: a folder with train.npz and test.npz, or a text."""

    name: str
    path: Path

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


@dataclass(frozen=True)
class Offering:
    """The limits that a provider's owner sets; the defaults allow everything.

    The node serves `slots` stages at once, each with its share of memory and cores. With `idle_seconds` it
    serves only if nobody has used keyboard or mouse for this long, with `load_percent` only while other
    programs use at most this share of all cores, and with `mains_only` only on mains power. On battery with
    less charge than `battery_min_percent` it sends less or serves nobody, according to `battery_low`.
    `metered` is the same rule for a link that its owner declares metered. The two rates limit bulk transfers;
    0 is no limit. `peers` are served if `accept_runs` is "listed", `runs` (by id) if it is "invited".
    Federated runs that name one of `own_data`, the owner's data sets, may train on it here; only the trained
    model leaves the machine. Each other peer that uses the services with a stage here has at most
    `peer_sessions` sessions at once, `peer_tokens_per_minute` (0: no limit), and `peer_cache_percent` of the
    memory for keys and values.
    """

    slots: int = 1
    hours: Hours = Hours()
    idle_seconds: float = 0.0
    load_percent: int = 0
    mains_only: bool = False
    battery_min_percent: int = 0
    battery_low: LowBattery = "never"
    metered: Metered = "no"
    upload_bytes_per_second: int = 0
    download_bytes_per_second: int = 0
    peers: tuple[PeerId, ...] = ()
    runs: tuple[str, ...] = ()
    own_data: tuple[NamedData, ...] = ()
    peer_sessions: int = PEER_SESSIONS_MAX
    peer_tokens_per_minute: int = 0
    peer_cache_percent: int = 50

    @property
    def are_watched(self) -> bool:
        """Whether a rule depends on the machine's current use, so that its state must be watched."""
        is_wanted = self.hours.spans or self.idle_seconds or self.load_percent or self.mains_only
        return bool(is_wanted or self.battery_min_percent or self.metered != "no")


class OfferTable(msgspec.Struct, frozen=True):
    """The table `[offer]` of a config file."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_MAX)] | None = None
    hours: str | None = None
    idle: str | None = None
    load: str | None = None
    mains_only: bool | None = None
    battery_min: str | None = None
    battery_low: LowBattery | None = None
    metered: Metered | None = None
    upload: str | None = None
    download: str | None = None
    peers: Annotated[tuple[str, ...], msgspec.Meta(max_length=LISTED_MAX)] | None = None
    runs: Annotated[tuple[str, ...], msgspec.Meta(max_length=LISTED_MAX)] | None = None
    own_data: Annotated[tuple[str, ...], msgspec.Meta(max_length=LISTED_MAX)] | None = None
    peer_sessions: Annotated[int, msgspec.Meta(ge=1, le=PEER_SESSIONS_MAX)] | None = None
    peer_tokens: Annotated[int, msgspec.Meta(ge=0, le=PEER_TOKENS_MAX)] | None = None
    peer_cache: str | None = None


# Readers: each turns a text that a person wrote into a value, or raises ValueError with the reason.


def read_slots(text: str) -> int:
    """Read the number of stages served at once."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= SLOTS_MAX):
        raise ValueError(f"want a whole number, 1 to {SLOTS_MAX}")
    return int(text)


def read_peer_sessions(text: str) -> int:
    """Read the number of sessions that one peer may have at once."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= PEER_SESSIONS_MAX):
        raise ValueError(f"want a whole number, 1 to {PEER_SESSIONS_MAX}")
    return int(text)


def read_peer_tokens(text: str) -> int:
    """Read the number of tokens per minute for one peer; 0 or `any` is no limit."""
    if text == "any":
        return 0
    if not (text.isascii() and text.isdigit() and int(text) <= PEER_TOKENS_MAX):
        raise ValueError("want a number of tokens a minute such as 6000, or any")
    return int(text)


def read_peer_cache(text: str) -> int:
    """Read the share of the memory for keys and values that one peer may use, in percent."""
    if not (found := read_percent(text)):
        raise ValueError("want a share such as 50%")
    return found


def read_hours(text: str) -> Hours:
    """Read times such as `22:00-07:00`, several separated by commas; empty or `always` means always."""
    if text in ("", "always"):
        return Hours()
    spans = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", part.strip())
        numbers = [int(group or 0) for group in match.groups()] if match else [99]
        first, end = numbers[0] * 60 + sum(numbers[1:2]), sum(numbers[2:3]) * 60 + sum(numbers[3:4])
        is_time = match is not None and numbers[1] < 60 and numbers[3] < 60
        if not is_time or first >= DAY_MINUTES or end > DAY_MINUTES or first == end:
            raise ValueError("want times of the day such as 22:00-07:00, several with commas, or always")
        spans.append((first, end))
    return Hours(tuple(spans))


def read_percent(text: str) -> int:
    """Read a share such as `30%`; 0 is no limit."""
    match = re.fullmatch(r"(\d{1,3}) ?%?", text)
    if match is None or int(match[1]) > 100:
        raise ValueError("want a share such as 30%, or 0 for any")
    return int(match[1])


def read_bandwidth(text: str) -> int:
    """Read a rate such as `10Mbit/s` or `1.5MB/s`, in bytes per second; 0 or `any` is no limit."""
    if text in ("0", "any"):
        return 0
    try:
        rate = read_rate(text)
    except ValueError as error:
        raise ValueError(f"{error}, or any") from None
    if rate < BANDWIDTH_MIN:
        raise ValueError("want at least 1Mbit/s: with less, no stage keeps up and streams would be cut")
    return rate


def read_peer_id(text: str) -> PeerId:
    """Read a peer id as `peerloom id` prints it."""
    try:
        return parse_peer(text)
    except ValueError:
        raise ValueError("want a peer id such as 12D3KooW...: `peerloom id`") from None


def read_followed(text: str) -> PeerId | None:
    """Read the peer id whose settings are followed; an empty text means none."""
    return read_peer_id(text) if text else None


def read_run_id(text: str) -> str:
    """Read a run's id, or its first eight digits."""
    if not re.fullmatch(r"[0-9a-f]{8,16}", text):
        raise ValueError("want a run's id, or its first eight hexadecimal digits")
    return text


def read_own_data(text: str) -> NamedData:
    """Read `scans=/data/scans`: a name that federated runs use, and the folder or text on this machine."""
    name, _, path = text.partition("=")
    found = expanded(path)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", name):
        raise ValueError("want a name and where the data lies, such as scans=/data/scans")
    if not found.is_absolute():
        raise ValueError(f"want a path from the root on, such as {name}=/data/{name}")
    return NamedData(name, found)
