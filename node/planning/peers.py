"""The peers of a plan as people write them: PEERS.toml, and the changes of `--what-if`.

[[peers]]
name = "lab-1"
memory = "22GB"
rate = "120GFLOPS"
link = "1Gbit"          # its own connection; the slower of two peers' connections counts

[[links]]
between = ["mbp", "lab-2"]
rate = "10Mbit"
latency = "20ms"
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from crypto.identity import PeerId, peer_text
from node.config import read_setting
from node.errors import UsageError
from node.protocols.runs import RUNS_WORD
from node.quantities import read_bytes, read_duration, read_flops, read_rate
from node.suggest import did_you_mean
from node.toml import read
from partition.plan.observed import FLOPS_PER_SECOND_MAX, Knowledge
from partition.plan.problem import (
    BUSY_MILLIWATTS,
    IDLE_MILLIWATTS,
    LINK_BYTES_PER_SECOND,
    LINK_NANOSECONDS,
    Link,
)
from partition.plan.rates import Calibration, assumed, decode_calibration, encode_calibration

PEERS_MAX = 4_096
LINKED_PEERS_MAX = 64
"""Maximum number of peers whose links are considered; a plan for more peers treats all links as equal."""


class PeerRow(msgspec.Struct, frozen=True):
    """`[[peers]]`: the offer of one peer. `watts` is its power while computing, `idle_watts` while
    waiting."""

    name: str
    memory: str
    rate: str
    link: str = ""
    latency: str = ""
    location: str = ""
    device: str = ""
    takes_runs: bool = True
    watts: float = BUSY_MILLIWATTS / 1000
    idle_watts: float = IDLE_MILLIWATTS / 1000


class LinkTable(msgspec.Struct, frozen=True):
    """`[[links]]`: the link between two peers, the same in both directions."""

    between: tuple[str, str]
    rate: str
    latency: str = ""


class PeersFile(msgspec.Struct, frozen=True):
    """The content of PEERS.toml."""

    peers: tuple[PeerRow, ...]
    links: tuple[LinkTable, ...] = ()


@dataclass(frozen=True)
class PeerSpecification:
    """One peer that could hold a stage. If it may not, `reason` says why; otherwise `reason` is empty."""

    name: str
    memory_bytes: int
    calibration: Calibration
    link: Link = field(default_factory=Link)
    reason: str = ""
    location: str = ""
    busy_milliwatts: int = BUSY_MILLIWATTS
    idle_milliwatts: int = IDLE_MILLIWATTS
    device: str = ""
    """torch's name of the kind of device; "" if unknown."""


@dataclass(frozen=True)
class Peers:
    """All peers of a plan, and the links for which more is known than the peers' own connections."""

    peers: tuple[PeerSpecification, ...]
    links: tuple[tuple[str, str, Link], ...] = ()
    is_measured: bool = False
    """Whether the links were measured, rather than written by a person."""

    def link(self, one: str, other: str) -> Link:
        """Return the link from one peer to another: the stated link, else the slower of their own
        connections."""
        for first, second, link in self.links:
            if (first, second) == (one, other):
                return link
        ends = [peer.link for peer in self.peers if peer.name in (one, other)]
        return Link(
            min((link.bytes_per_second for link in ends), default=LINK_BYTES_PER_SECOND),
            max((link.nanoseconds for link in ends), default=LINK_NANOSECONDS),
        )

    def with_link(self, one: str, other: str, link: Link) -> "Peers":
        """Return the same peers with a changed link between two of them, in both directions."""
        kept = [row for row in self.links if {row[0], row[1]} != {one, other}]
        return replace(self, links=(*kept, (one, other, link), (other, one, link)))


def read_peers(file: str) -> Peers:
    """Return the peers of a PEERS.toml. Raises UsageError."""
    document = read(Path(file).expanduser(), PeersFile)
    found = document.value
    if not found.peers or len(found.peers) > PEERS_MAX:
        raise UsageError(f"{file}: {len(found.peers)} peers; want 1 to {PEERS_MAX}")
    names = [row.name for row in found.peers]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{file}: two peers have the name '{name}'")
    peers = tuple(_peer(row, document.where("peers", number)) for number, row in enumerate(found.peers))
    links: list[tuple[str, str, Link]] = []
    for number, row in enumerate(found.links):
        where = document.where("links", number)
        for name in row.between:
            if name not in names:
                raise UsageError(f"{where}: no peer has the name '{name}'{did_you_mean(name, names)}")
        one, other = row.between
        link = Link(read_setting(f"{where}: rate", row.rate, read_rate), _latency(row.latency, where))
        links += [(one, other, link), (other, one, link)]
    return Peers(peers, tuple(links))


def _peer(row: PeerRow, where: str) -> PeerSpecification:
    link = Link(
        read_setting(f"{where}: link", row.link, read_rate) if row.link else LINK_BYTES_PER_SECOND,
        _latency(row.latency, where),
    )
    return PeerSpecification(
        name=row.name,
        memory_bytes=read_setting(f"{where}: memory", row.memory, read_bytes),
        calibration=assumed(read_setting(f"{where}: rate", row.rate, read_flops)),
        link=link,
        reason="" if row.takes_runs else "takes no runs",
        location=row.location,
        device=row.device,
        busy_milliwatts=round(row.watts * 1000),
        idle_milliwatts=round(row.idle_watts * 1000),
    )


MEASUREMENTS_SCHEMA = "peerloom/measurements/1"


def measurements_document(knowledge: Knowledge, peers: Collection[PeerId]) -> dict[str, Any]:
    """Return measurements of these peers and their links as plain values: calibrations (hexadecimal, as
    published), rates that others observed in runs, and links."""
    limits = {peer: knowledge.flops_per_second(peer, FLOPS_PER_SECOND_MAX) for peer in peers}
    linked = sorted(peers)[:LINKED_PEERS_MAX]
    return {
        "schema": MEASUREMENTS_SCHEMA,
        "calibrations": {
            peer_text(peer): encode_calibration(calibration).hex()
            for peer, calibration in sorted(knowledge.calibrations.items())
            if peer in limits
        },
        "rates": {
            peer_text(peer): rate for peer, rate in sorted(limits.items()) if rate < FLOPS_PER_SECOND_MAX
        },
        "links": [
            {
                "sender": peer_text(one),
                "receiver": peer_text(other),
                "bytes_per_second": link.bytes_per_second,
                "seconds": link.nanoseconds / 1e9,
            }
            for (one, other), link in sorted(knowledge.links(linked).items())
        ],
    }


def live_peers(
    status: Mapping[str, Any], peers: Mapping[str, Any], measured: Mapping[str, Any] | None = None
) -> Peers:
    """Return the node and its live members from its `peerloom/status/1` and `peerloom/peers/1` documents,
    with the measurements `measured` (`peerloom/measurements/1`).

    Missing measurements are estimated: times of operators in proportion to a peer's rate, and a usual link.
    """
    found: list[PeerSpecification] = []
    measured = measured or {"calibrations": {}, "rates": {}, "links": []}
    names: dict[str, str] = {}
    for row in ({**status, "status": "alive"}, *peers["peers"]):
        capacity = row["capacity"]
        if row["status"] != "alive" or capacity is None:
            continue
        name = row["name"] or row["peer"][-6:]
        if any(name == other.name for other in found):
            name = f"{name} ...{row['peer'][-6:]}"
        names[row["peer"]] = name
        rate = int(capacity["flops_per_second"])
        calibration = _calibration(row["peer"], max(1, rate), measured)
        if row["peer"] == status["peer"]:  # the planning peer is the run's requester
            calibration = calibration.as_requester()
        busy, idle = calibration.draw_milliwatts
        found.append(
            PeerSpecification(
                name=name,
                memory_bytes=capacity["memory_free_bytes"],
                calibration=calibration,
                busy_milliwatts=busy,
                idle_milliwatts=idle,
                reason=_reason(row, rate),
                location=(row.get("place") or {}).get("location") or capacity["location"],
                device=capacity.get("device", "").partition(":")[0],
            )
        )
    links = [
        (
            names[row["sender"]],
            names[row["receiver"]],
            Link(row["bytes_per_second"], int(row["seconds"] * 1e9)),
        )
        for row in measured["links"]
        if row["sender"] in names and row["receiver"] in names
    ]
    return Peers(tuple(found), tuple(links), is_measured=bool(links))


def _reason(row: Mapping[str, Any], rate: int) -> str:
    """Return why a peer accepts no stage of this node's runs; "" if it does."""
    if not rate:
        return "takes no stages"
    standing = row.get("standing")
    if standing is not None and RUNS_WORD not in standing["capabilities"]:
        return "understands runs of a different version"
    return ""


def in_place(peers: Peers, place: str) -> Peers:
    """Return the peers, with those outside the location `place` marked as ineligible; "" allows any
    location."""
    rows = tuple(
        peer if place in ("", peer.location) or peer.reason else replace(peer, reason=f"not in {place}")
        for peer in peers.peers
    )
    return replace(peers, peers=rows)


def on_devices(peers: Peers, devices: Sequence[str]) -> Peers:
    """Return the peers, with those on other devices marked as ineligible; empty `devices` allow any."""
    wanted = " or ".join(devices)
    rows = tuple(
        replace(peer, reason=f"not on {wanted}") if devices and peer.device not in devices else peer
        for peer in peers.peers
    )
    return replace(peers, peers=rows)


def _calibration(peer: str, rate: int, measured: Mapping[str, Any]) -> Calibration:
    """Return a peer's times of operators, slowed down to the rate that others observed."""
    data = measured["calibrations"].get(peer)
    found = assumed(rate) if data is None else decode_calibration(bytes.fromhex(data))
    most = measured["rates"].get(peer, found.flops_per_second)
    return found.scaled(most * 1000 // found.flops_per_second) if most < found.flops_per_second else found


def _latency(text: str, where: str) -> int:
    """Return a latency in nanoseconds; "" stands for the usual one."""
    if not text:
        return LINK_NANOSECONDS
    seconds: float = read_setting(f"{where}: latency", text, read_duration)
    return round(seconds * 1e9)


def what_if(peers: Peers, text: str) -> Peers:
    """Return the peers after changes such as `lose=NAME`, `add=8GB@50GFLOPS@100Mbit`, `link=A:B@1Gbit`,
    separated by commas. Raises UsageError."""
    for number, part in enumerate(text.split(",")):
        where = f"--what-if {part}"
        key, _, value = part.strip().partition("=")
        if key == "lose":
            names = [peer.name for peer in peers.peers]
            if value not in names:
                raise UsageError(f"{where}: no peer has the name '{value}'{did_you_mean(value, names)}")
            peers = replace(peers, peers=tuple(peer for peer in peers.peers if peer.name != value))
        elif key == "add":
            peers = replace(peers, peers=(*peers.peers, _added(value, f"new-{number + 1}", where)))
        elif key == "link":
            ends, _, rate = value.partition("@")
            one, _, other = ends.partition(":")
            known = [peer.name for peer in peers.peers]
            for name in (one, other):
                if name not in known:
                    raise UsageError(f"{where}: no peer has the name '{name}'{did_you_mean(name, known)}")
            peers = peers.with_link(
                one,
                other,
                replace(
                    peers.link(one, other), bytes_per_second=read_setting(f"{where}: rate", rate, read_rate)
                ),
            )
        else:
            raise UsageError(f"{where}: want lose=NAME, add=8GB@50GFLOPS@100Mbit or link=A:B@1Gbit")
    return peers


def _added(value: str, name: str, where: str) -> PeerSpecification:
    memory, *rest = value.split("@")
    if not rest or len(rest) > 2:
        raise UsageError(f"{where}: want add=8GB@50GFLOPS@100Mbit")
    row = PeerRow(name, memory, rest[0], rest[1] if len(rest) > 1 else "")
    return _peer(row, where)
