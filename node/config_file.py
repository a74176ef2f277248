"""The tables of a config file; None means "not given". The readers in `node.config.RULES` parse their
texts."""

from typing import Annotated, Literal

import msgspec

from crypto.contact import ADDRESSES_MAX
from node.offering import FOLLOWABLE, OfferTable
from node.settings import CIRCUITS_MAX, CORES_MAX

Preset = Literal["lan", "wan", "host", "local"]
Scope = Literal["all", "neighbourhood"]
AcceptRuns = Literal["swarm", "listed", "invited", "never"]


class JoinTable(msgspec.Struct, frozen=True):
    seeds: tuple[str, ...] | None = None
    seed_files: tuple[str, ...] | None = None
    remember: bool | None = None
    lan: bool | None = None


class ListenTable(msgspec.Struct, frozen=True):
    addresses: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=ADDRESSES_MAX)] | None = None
    announce: Annotated[tuple[str, ...], msgspec.Meta(max_length=ADDRESSES_MAX)] | None = None
    map: bool | None = None


class SwarmTable(msgspec.Struct, frozen=True):
    name: str | None = None
    preset: Preset | None = None
    scope: Scope | None = None
    key_file: str | None = None
    work_bits: int | None = None


class ResourcesTable(msgspec.Struct, frozen=True):
    device: str | None = None
    memory: str | None = None
    scratch: str | None = None
    disk: str | None = None
    cores: Annotated[int, msgspec.Meta(ge=0, le=CORES_MAX)] | None = None
    location: str | None = None
    accept_runs: AcceptRuns | None = None
    allow_unfenced: bool | None = None
    calibrate: bool | None = None
    spare_process: bool | None = None


class WebTable(msgspec.Struct, frozen=True):
    address: str | None = None
    cert: str | None = None
    proxy: bool | None = None


class AlertsTable(msgspec.Struct, frozen=True):
    webhook: str | None = None
    command: str | None = None


class LogTable(msgspec.Struct, frozen=True):
    format: str | None = None
    levels: str | None = None


class RelayTable(msgspec.Struct, frozen=True):
    enabled: bool | None = None
    upload: str | None = None
    circuits: Annotated[int, msgspec.Meta(ge=0, le=CIRCUITS_MAX)] | None = None


class FollowTable(msgspec.Struct, frozen=True):
    key: str | None = None
    allow: Annotated[tuple[str, ...], msgspec.Meta(max_length=len(FOLLOWABLE) + 1)] | None = None


class ConfigFile(msgspec.Struct, frozen=True):
    name: str | None = None
    data_dir: str | None = None
    observer: bool | None = None
    join: JoinTable = JoinTable()
    listen: ListenTable = ListenTable()
    swarm: SwarmTable = SwarmTable()
    resources: ResourcesTable = ResourcesTable()
    offer: OfferTable = OfferTable()
    web: WebTable = WebTable()
    alerts: AlertsTable = AlertsTable()
    log: LogTable = LogTable()
    relay: RelayTable = RelayTable()
    follow: FollowTable = FollowTable()
