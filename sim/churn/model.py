"""The churn settings of a scenario file: the tables `[churn]` and `[[events]]`. Only data."""

from typing import Annotated, Literal

import msgspec

from sim.network.model import Seconds, Share

Profile = Literal["none", "kad", "bittorrent", "spot", "lab"]


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution of the lengths of sessions or absences. `shape` and `scale_seconds` are those of the
    textbooks for the Weibull distribution; sigma and median of the lognormal; `scale_seconds` is the mean of
    the exponential and the value of the constant. bathtub: preemptible machines, with a hard stop at
    `scale_seconds` (24 h)."""

    distribution: Literal["weibull", "lognormal", "exponential", "constant", "bathtub", "forever"]
    scale_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 3600.0
    shape: Annotated[float, msgspec.Meta(ge=0.05, le=100)] = 1.0


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version of the software that `share` of the peers run at the beginning."""

    name: str
    share: Share


class Churn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions and absences. A profile fills in settings that are not given. `speedup` divides all times, so
    that an hour of a profile fits a short experiment. The first `permanent` peers of the list never go. A
    share `crash_share` of departures are crashes, the others say goodbye; `remembers` keeps their disks.

    `trace`: a file of arrivals and departures that replaces sessions and absences. `wave_depth`: how much the
    rates of arrival and departure swing over a day of `wave_seconds`, which begins at noon. `versions`: the
    versions that peers run, for events that concern one version.
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
    """Something that happens at one instant, to `share` of the peers, or of those in `regions` and of
    `versions` where these are given, chosen by the seed.

    partition: they are cut off from the others for `lasts_seconds`. one-way: others hear them, they hear
    nobody. no-datagrams: datagrams to and from them are dropped for `lasts_seconds` while streams pass;
    messages do not move to streams as a real node's do, so this is harsher. crash, leave: they stop, and
    start again after `lasts_seconds` (0: never). join: this share of the peers kept back start within
    `lasts_seconds` (a flash crowd). freeze: they are stopped for `lasts_seconds`. slow: computing takes
    `factor` times as long for `lasts_seconds`. restart: a crash with an immediate return under `version`;
    where it is given, only peers that run another. loss: this share of their messages is lost for
    `lasts_seconds`. reboot: the routers before them forget every mapping.
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
    """Repeated so often, until the end; 0: once."""
