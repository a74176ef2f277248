"""The churn settings of a scenario file: the tables `[churn]` and `[[events]]`. Only data."""

from typing import Annotated, Literal

import msgspec

from sim.network.model import Seconds, Share

Profile = Literal["none", "kad", "bittorrent", "spot", "lab"]


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution of the lengths of sessions or absences. `shape` and `scale_seconds` have their textbook
    meaning for the Weibull distribution. They are sigma and median of the lognormal distribution;
    `scale_seconds` is the mean of the exponential distribution and the value of the constant one. bathtub:
    preemptible machines, with a hard stop at `scale_seconds` (24 h)."""

    distribution: Literal["weibull", "lognormal", "exponential", "constant", "bathtub", "forever"]
    scale_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 3600.0
    shape: Annotated[float, msgspec.Meta(ge=0.05, le=100)] = 1.0


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version of the software that a `share` of the peers run at the start."""

    name: str
    share: Share


class Churn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions and absences. A profile fills in settings that are not given. `speedup` divides all times, so
    that an hour of a profile fits into a short experiment. The first `permanent` peers in the list never
    leave. A share `crash_share` of departures are crashes; in the others the peer says goodbye. `remembers`:
    peers that return have their disks.

    `trace`: a file of arrivals and departures that replaces sessions and absences. `wave_depth`: how much the
    rates of arrival and departure vary over a day of `wave_seconds`, which begins at noon. `versions`: the
    versions that peers run, for events that affect one version.
    """

    profile: Profile = "none"
    sessions: Distribution | None = None
    absences: Distribution | None = None
    trace: str = ""
    speedup: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    permanent: Annotated[int, msgspec.Meta(ge=0)] = 1
    crash_share: Share = 0.7
    remembers: bool = True
    wave_depth: Share = 0.0
    wave_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 86_400.0
    versions: tuple[Version, ...] = ()


class ChurnEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event at one instant that affects a `share` of the peers, chosen by the seed. If `regions` or
    `versions` are given, it affects only peers in or with these.

    partition: the peers are cut off from the others for `lasts_seconds`. one-way: others receive their
    messages, but they receive none. no-datagrams: datagrams to and from them are dropped for `lasts_seconds`
    while streams pass. This is harsher than in reality, because messages do not move to streams as a real
    node's do. crash, leave: they stop, and start again after `lasts_seconds` (0: never). join: this share of
    the peers kept back start within `lasts_seconds` (a flash crowd). freeze: they are stopped for
    `lasts_seconds`. slow: computing takes `factor` times as long for `lasts_seconds`. restart: a crash and an
    immediate return with `version`; if `version` is given, peers that already run it are not affected. loss:
    this share of their messages is lost for `lasts_seconds`. reboot: the routers in front of them forget all
    mappings.
    """

    at_seconds: Seconds
    kind: Literal[
        "partition",
        "one-way",
        "no-datagrams",
        "crash",
        "leave",
        "join",
        "freeze",
        "slow",
        "restart",
        "loss",
        "reboot",
    ]
    share: Share = 0.5
    regions: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    lasts_seconds: Seconds = 60.0
    factor: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 4.0
    loss: Share = 0.1
    version: str = ""
    every_seconds: Seconds = 0.0
    """Interval at which the event is repeated until the end; 0: it happens once."""
