"""The churn settings of a scenario file: the tables `[churn]` and `[[events]]`. Only data."""

from typing import Annotated, Literal

import msgspec

from sim.network.model import Seconds, Share

Profile = Literal["none", "kad", "bittorrent", "spot", "lab"]


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long sessions or absences last. `shape` and `scale_seconds` as in the textbooks: of the Weibull
    distribution; sigma and median of the lognormal; `scale_seconds` is the mean of the exponential and the
    value of the constant. bathtub: preemptible machines, with a hard stop at `scale_seconds` (24 h)."""

    distribution: Literal["weibull", "lognormal", "exponential", "constant", "bathtub", "forever"]
    scale_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 3600.0
    shape: Annotated[float, msgspec.Meta(ge=0.05, le=100)] = 1.0


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version of the software that `share` of the peers run at the beginning."""

    name: str
    share: Share


class Churn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions and absences. A profile fills in what is not given. `speedup` divides all times, so that
    an hour of a profile fits a short experiment. `permanent` peers at the beginning of the list never go.
    `crash_share` of them go without a word, the others leave; `remembers` keeps their disks.

    `trace`: a file of who came and went when, in place of sessions and absences. `wave_depth`: how much the
    rates of coming and going swing over a day of `wave_seconds`, which begins at noon. `versions`: what the
    peers run, for events that concern one of them.
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


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that happens at one instant, to `share` of the peers, or of those in `regions` and of
    `versions` where these are given, chosen by the seed.

    partition: they are cut off from the others for `lasts_seconds`. one-way: others hear them, they hear
    nobody. no-datagrams: no datagram goes to them or from them for `lasts_seconds`, and streams do; messages
    do not change over to streams, as a real node's do, so this is harsher. crash, leave: they stop, and start
    again after `lasts_seconds` (0: never). join: so many of those that were kept back until now start, within
    `lasts_seconds` (a flash crowd). freeze: they stand still for
    `lasts_seconds`. slow: computing takes `factor` times as long for `lasts_seconds`. restart: as crash, and
    back at once under `version`, if it is given only those that do not run it yet. loss: this share of their
    messages is lost for `lasts_seconds`. reboot: the routers before them forget every mapping.
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
