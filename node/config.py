"""The configuration of a node: flag > `PEERLOOM_*` > file > default. None of them is required.

A frozen value, without trio and torch. Every fault is one `UsageError` that gives the location (`--join`,
`PEERLOOM_JOIN`, `node.toml:7`), the fault and valid values. `RULES` is the only list of settings: the flags,
the environment names and the file keys are all derived from it.
"""

import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from crypto.contact import ADDRESSES_MAX, NAME_LENGTH_MAX, Address
from crypto.identity import PeerId
from node import eventlog, toml
from node.addresses import DEFAULT_PORT, clean, read_addresses
from node.config_file import AcceptRuns as AcceptRuns
from node.config_file import ConfigFile, Scope
from node.config_file import Preset as Preset
from node.errors import UsageError
from node.offering import (
    ALL_FOLLOWABLE,
    FOLLOWABLE,
    Offering,
    read_bandwidth,
    read_followed,
    read_hours,
    read_own_data,
    read_peer_cache,
    read_peer_id,
    read_peer_sessions,
    read_peer_tokens,
    read_percent,
    read_run_id,
    read_slots,
)
from node.paths import ENVIRONMENT_PREFIX, default_data_dir
from node.quantities import Memory, read_duration, read_memory
from node.settings import DEFAULT_WEB as DEFAULT_WEB
from node.settings import (
    GUEST_BYTES_MAX,
    check_web,
    label,
    one_of,
    read_announce,
    read_circuits,
    read_command,
    read_cores,
    read_device,
    read_optional_path,
    read_path,
    read_port,
    read_switch,
    read_webhook,
    read_work_bits,
)
from node.settings import Relaying as Relaying
from node.settings import Web as Web
from node.settings import read_listen as read_listen
from node.settings import read_web as read_web
from node.suggest import nearest

DEFAULT_LISTEN = (
    Address("ip4", "0.0.0.0", DEFAULT_PORT),  # noqa: S104 - a node is there to be reached
    Address("ip6", "::", DEFAULT_PORT),
)
SEEDS_MAX = 256
"""Maximum number of seeds from all sources together. All are dialled at the start; dialling more would be a
scan."""
LABEL_LENGTH_MAX = 64
MEMORY_GIVEN = Memory(fraction=0.8)
SCRATCH_GIVEN = Memory(bytes=16 << 30)
"""The same amount as is kept for others on the disk. A step with 16 GiB of frames would not fit in memory."""
DISK_GIVEN = Memory(bytes=GUEST_BYTES_MAX)


@dataclass(frozen=True)
class JoinSettings:
    """The ways to find the first peer. `seeds` holds flags, file and seed files, in that order; `lan` enables
    beacons on the local network."""

    seeds: tuple[Address, ...] = ()
    remember: bool = True
    lan: bool = True


@dataclass(frozen=True)
class Listen:
    """The addresses of this node, for TCP and UDP. Port 0 takes any free port; `announce` replaces the
    announced addresses. With `may_move`, one of the next ten ports is taken if the port is in use; this is
    allowed unless the user gave an address to listen on. `map`: let the router map the port to this
    machine."""

    addresses: tuple[Address, ...] = DEFAULT_LISTEN
    announce: tuple[Address, ...] = ()
    may_move: bool = True
    map: bool = True

    @property
    def is_open(self) -> bool:
        """Whether this node listens on all networks of this machine."""
        return any(address.host in ("0.0.0.0", "::") for address in self.addresses)  # noqa: S104 - compared


@dataclass(frozen=True)
class SwarmSettings:
    """The swarm, and its preset of timers. A `key_file` makes it private. `scope` and `work_bits` must be the
    same in the whole swarm. With scope "all" a member lists all others (at most 2,000); with "neighbourhood"
    it lists the neighbourhood of its key, in a swarm of any size. `work_bits` is the proof of work in every
    node's id (docs/dht.md)."""

    name: str = "default"
    preset: Preset = "lan"
    scope: Scope = "all"
    key_file: Path | None = None
    work_bits: int = 0


@dataclass(frozen=True)
class Resources:
    """The resources that this machine gives. `cores` 0 means all; `device` is auto, cpu, mps or cuda:N. With
    `allow_unfenced` it takes stages of others even if it cannot fence them. `scratch` is the disk space that
    all stages share for the files of their processes, and for frames of open steps that do not fit in memory.
    `disk` holds data of others (shards, checkpoints, results); the oldest are deleted when it is full.
    `calibrate` measures the time of each class of operators in the background, once per machine. A
    `spare_process` is loaded for the next stage while the machine is idle: it takes 0.2 GB."""

    device: str = "auto"
    memory: Memory = MEMORY_GIVEN
    scratch: Memory = SCRATCH_GIVEN
    disk: Memory = DISK_GIVEN
    cores: int = 0
    location: str = ""
    accept_runs: AcceptRuns = "swarm"
    allow_unfenced: bool = False
    calibrate: bool = True
    spare_process: bool = True


@dataclass(frozen=True)
class AlertSettings:
    """Additional targets of alerts besides the screen and the page: a URL for a POST, or a program with its
    arguments."""

    webhook: str = ""
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Log:
    """Whether events are written to a file in the data folder, and the lowest level that is written, by
    area."""

    format: eventlog.Format = "off"
    levels: Mapping[str, int] = field(default_factory=lambda: MappingProxyType(eventlog.read_levels("")))


@dataclass(frozen=True)
class Follow:
    """The `key` whose signed settings the daemon follows, and the settings that its owner lets this key
    change."""

    key: PeerId | None = None
    allow: tuple[str, ...] = (ALL_FOLLOWABLE,)


@dataclass(frozen=True)
class Config:
    """All settings of a node. An `observer` watches the swarm but takes no stage."""

    name: str = field(default_factory=lambda: default_name())
    data_dir: Path = field(default_factory=lambda: default_data_dir(os.environ))
    observer: bool = False
    join: JoinSettings = JoinSettings()
    listen: Listen = Listen()
    swarm: SwarmSettings = SwarmSettings()
    resources: Resources = Resources()
    offer: Offering = field(default_factory=Offering)
    web: Web = field(default_factory=Web)
    alerts: AlertSettings = AlertSettings()
    log: Log = Log()
    relay: Relaying = field(default_factory=Relaying)
    follow: Follow = Follow()

    @classmethod
    def load(cls, path: Path | str) -> "Config":
        """Return the config in a file, overridden by `PEERLOOM_*`. Raises UsageError."""
        return resolve({"config": str(path)}, os.environ)


def default_name() -> str:
    """Return this machine's name, without its domain."""
    name = "".join(letter for letter in platform.node().partition(".")[0] if letter.isprintable())
    return name[:NAME_LENGTH_MAX] or "node"


# Readers: each turns a text that a person wrote into a value, or raises ValueError with the reason.


@dataclass(frozen=True)
class SettingRule:
    """One setting: its flag (and environment name), its key in the file, and the reader of its text."""

    name: str
    key: tuple[str, ...]
    read: Callable[[str], Any]
    many: bool = False
    is_packed: bool = False
    """Whether one text may hold several values; in that case `read` returns a tuple."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


RULES = (
    SettingRule("name", ("name",), label(NAME_LENGTH_MAX)),
    SettingRule("data_dir", ("data_dir",), read_path),
    SettingRule("observer", ("observer",), read_switch),
    SettingRule("join", ("join", "seeds"), read_addresses, many=True, is_packed=True),
    SettingRule("seed_files", ("join", "seed_files"), read_path, many=True),
    SettingRule("remember", ("join", "remember"), read_switch),
    SettingRule("lan", ("join", "lan"), read_switch),
    SettingRule("listen", ("listen", "addresses"), read_listen, many=True),
    SettingRule("announce", ("listen", "announce"), read_announce, many=True),
    SettingRule("map", ("listen", "map"), read_switch),
    SettingRule("swarm", ("swarm", "name"), label(LABEL_LENGTH_MAX)),
    SettingRule("preset", ("swarm", "preset"), one_of("lan", "wan", "host", "local")),
    SettingRule("scope", ("swarm", "scope"), one_of("all", "neighbourhood")),
    SettingRule("key_file", ("swarm", "key_file"), read_optional_path),
    SettingRule("work_bits", ("swarm", "work_bits"), read_work_bits),
    SettingRule("device", ("resources", "device"), read_device),
    SettingRule("memory", ("resources", "memory"), read_memory),
    SettingRule("scratch", ("resources", "scratch"), read_memory),
    SettingRule("cores", ("resources", "cores"), read_cores),
    SettingRule("location", ("resources", "location"), label(LABEL_LENGTH_MAX, may_be_empty=True)),
    SettingRule("accept_runs", ("resources", "accept_runs"), one_of("swarm", "listed", "invited", "never")),
    SettingRule("slots", ("offer", "slots"), read_slots),
    SettingRule("hours", ("offer", "hours"), read_hours),
    SettingRule("idle", ("offer", "idle"), read_duration),
    SettingRule("load", ("offer", "load"), read_percent),
    SettingRule("upload", ("offer", "upload"), read_bandwidth),
    SettingRule("download", ("offer", "download"), read_bandwidth),
    SettingRule("disk", ("resources", "disk"), read_memory),
    SettingRule("mains_only", ("offer", "mains_only"), read_switch),
    SettingRule("battery_min", ("offer", "battery_min"), read_percent),
    SettingRule("battery_low", ("offer", "battery_low"), one_of("never", "less")),
    SettingRule("metered", ("offer", "metered"), one_of("no", "less", "never")),
    SettingRule("peers", ("offer", "peers"), read_peer_id, many=True),
    SettingRule("runs", ("offer", "runs"), read_run_id, many=True),
    SettingRule("peer_sessions", ("offer", "peer_sessions"), read_peer_sessions),
    SettingRule("peer_tokens", ("offer", "peer_tokens"), read_peer_tokens),
    SettingRule("peer_cache", ("offer", "peer_cache"), read_peer_cache),
    SettingRule("own_data", ("offer", "own_data"), read_own_data, many=True),
    SettingRule("web", ("web", "address"), read_web),
    SettingRule("web_cert", ("web", "cert"), read_optional_path),
    SettingRule("web_proxy", ("web", "proxy"), read_switch),
    SettingRule("log", ("log", "format"), one_of("off", "text", "json")),
    SettingRule("log_levels", ("log", "levels"), eventlog.read_levels),
    SettingRule("relay", ("relay", "enabled"), read_switch),
    SettingRule("relay_upload", ("relay", "upload"), read_bandwidth),
    SettingRule("relay_circuits", ("relay", "circuits"), read_circuits),
    SettingRule("alert_webhook", ("alerts", "webhook"), read_webhook),
    SettingRule("alert_command", ("alerts", "command"), read_command),
    SettingRule("follow", ("follow", "key"), read_followed),
    SettingRule("follow_allow", ("follow", "allow"), one_of(ALL_FOLLOWABLE, *FOLLOWABLE), many=True),
    SettingRule("allow_unfenced", ("resources", "allow_unfenced"), read_switch),
    SettingRule("calibrate", ("resources", "calibrate"), read_switch),
    SettingRule("spare_process", ("resources", "spare_process"), read_switch),
)


def rule_of(name: str) -> SettingRule:
    """Return the setting with this name."""
    return next(rule for rule in RULES if rule.name == name)


_CONFIG_RULE = SettingRule("config", (), read_path)
_PORT_RULE = SettingRule("port", (), read_port)
"""Only a flag, because Kubernetes sets PEERLOOM_PORT if there is a service named peerloom."""


def resolve(flags: Mapping[str, str | bool | Sequence[str] | None], environ: Mapping[str, str]) -> Config:
    """Merge all sources into a Config.

    `flags` maps rule names (and `config`, the file) to the typed text, which is None or empty if not given. A
    list from a higher source replaces the list from a lower one, except for `join`, where all seeds are
    tried.

    Raises:
        UsageError: the first fault, with its location.
    """
    _check_environment(environ)
    document, folder = _read_file(flags, environ)
    values: dict[str, Any] = {}
    for rule in RULES:
        sources = [_from_flags(rule, flags), _from_environment(rule, environ)]
        sources.append(_from_file(rule, document, folder))
        given = [source for source in sources if source is not None]
        if rule.name == "join":
            values[rule.name] = tuple(seed for source in given for seed in source)
        elif given:
            values[rule.name] = given[0]
    seeds = values["join"] + tuple(
        seed for path in values.pop("seed_files", ()) for seed in read_seed_file(path)
    )
    values["join"] = tuple(dict.fromkeys(seeds))
    for name in ("listen", "announce"):
        if len(values.get(name, ())) > ADDRESSES_MAX:
            raise UsageError(f"{len(values[name])} addresses to {name}; at most {ADDRESSES_MAX} are allowed")
    if len(values["join"]) > SEEDS_MAX:
        raise UsageError(f"{len(values['join'])} seeds to join; at most {SEEDS_MAX} are tried")
    port = _from_flags(_PORT_RULE, flags)
    if port is not None:
        if flags.get("listen"):
            raise UsageError(
                "--port and --listen: give one of the two",
                (
                    "use --port N (or one of the next ports, if N is taken) or --listen "
                    "HOST:N (exactly that port)"
                ),
            )
        values["listen"] = tuple(replace(address, port=port) for address in DEFAULT_LISTEN)
    return _build(values, may_move="listen" not in values or port is not None)


def read_seed_file(path: Path) -> tuple[Address, ...]:
    """Read one or several addresses per line; `#` starts a comment. Raises UsageError with file and line."""
    seeds: list[Address] = []
    for number, line in enumerate(toml.read_text(path).splitlines(), start=1):
        text = line.partition("#")[0]
        if clean(text):
            seeds += read_setting(f"{path}:{number}:", text, read_addresses)
    return tuple(seeds)


def read_join(texts: Sequence[str] | str) -> tuple[Address, ...]:
    """Return the addresses through which a program wants to join. Raises UsageError."""
    given = (texts,) if isinstance(texts, str) else texts
    return tuple(chain.from_iterable(read_setting("join:", text, read_addresses) for text in given))


def read_setting(where: str, text: str, read: Callable[[str], Any]) -> Any:
    """Read one text. Raises UsageError with the text `{where} {text}: {reason}`."""
    try:
        return read(text)
    except ValueError as error:
        typed = text if text and text.isprintable() and len(text) <= 60 else toml.shown(text)
        raise UsageError(f"{where} {typed}: {error}") from None


def _check_environment(environ: Mapping[str, str]) -> None:
    """Raise UsageError for a misspelt variable. A variable whose name is unlike ours may belong to another
    program. (Kubernetes sets PEERLOOM_PORT and PEERLOOM_SERVICE_HOST if there is a service named peerloom.)
    """
    known = [rule.environment for rule in (*RULES, _CONFIG_RULE)]
    words = [name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in known]
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            near = nearest(name.removeprefix(ENVIRONMENT_PREFIX), words, cutoff=0.75)
            if near is not None:
                right = ENVIRONMENT_PREFIX + near.upper()
                raise UsageError(f"unknown variable {name} in the environment; did you mean {right}?")


def _read_file(
    flags: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[toml.Document[ConfigFile] | None, Path]:
    path = _from_flags(_CONFIG_RULE, flags) or _from_environment(_CONFIG_RULE, environ)
    if path is None:
        return None, Path()
    return toml.read(path, ConfigFile), path.parent


def _from_flags(rule: SettingRule, flags: Mapping[str, Any]) -> Any:
    given = flags.get(rule.name)
    if given is None or (rule.many and not given):
        return None
    if isinstance(given, bool):
        return given
    if rule.many:
        return _many(rule, (read_setting(rule.flag, text, rule.read) for text in given))
    return read_setting(rule.flag, given, rule.read)


def _many(rule: SettingRule, values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values of a list; if the setting is packed, each item may hold several."""
    return tuple(chain.from_iterable(values)) if rule.is_packed else tuple(values)


def _from_environment(rule: SettingRule, environ: Mapping[str, str]) -> Any:
    text = environ.get(rule.environment)
    if text is None:
        return None
    where = f"{rule.environment}:"
    if rule.many:
        items = [text] if rule.is_packed else re.split(r"[,\s]+", text)
        return _many(rule, (read_setting(where, item, rule.read) for item in items if item.strip()))
    return read_setting(where, text, rule.read)


def _from_file(rule: SettingRule, document: toml.Document[ConfigFile] | None, folder: Path) -> Any:
    if document is None:
        return None
    value: Any = document.value
    for part in rule.key:
        value = getattr(value, part)
    if isinstance(value, tuple):
        read = _many(rule, (_from_file_text(rule, item, document, at) for at, item in enumerate(value)))
        return tuple(folder / item if isinstance(item, Path) else item for item in read)
    if isinstance(value, str):
        value = _from_file_text(rule, value, document)
    # Paths in a file are relative to the file, not to the current folder.
    return folder / value if isinstance(value, Path) else value


def _from_file_text(rule: SettingRule, text: str, document: toml.Document[ConfigFile], *index: int) -> Any:
    where = f"{document.where(*rule.key, *index)}: {rule.key[-1]}"
    return read_setting(where, text, rule.read)


def _build(values: Mapping[str, Any], *, may_move: bool) -> Config:
    def section(**names: str) -> dict[str, Any]:
        return {key: values[name] for key, name in names.items() if name in values}

    return Config(
        **section(name="name", data_dir="data_dir", observer="observer"),
        join=JoinSettings(**section(seeds="join", remember="remember", lan="lan")),
        listen=Listen(**section(addresses="listen", announce="announce", map="map"), may_move=may_move),
        swarm=SwarmSettings(
            **section(
                name="swarm", preset="preset", scope="scope", key_file="key_file", work_bits="work_bits"
            )
        ),
        resources=Resources(
            **section(
                device="device",
                memory="memory",
                scratch="scratch",
                disk="disk",
                cores="cores",
                location="location",
                accept_runs="accept_runs",
                allow_unfenced="allow_unfenced",
                calibrate="calibrate",
                spare_process="spare_process",
            )
        ),
        offer=Offering(
            **section(
                slots="slots",
                hours="hours",
                idle_seconds="idle",
                load_percent="load",
                mains_only="mains_only",
                battery_min_percent="battery_min",
                battery_low="battery_low",
                metered="metered",
                upload_bytes_per_second="upload",
                download_bytes_per_second="download",
                peers="peers",
                runs="runs",
                own_data="own_data",
                peer_sessions="peer_sessions",
                peer_tokens_per_minute="peer_tokens",
                peer_cache_percent="peer_cache",
            )
        ),
        web=check_web(replace(values.get("web", Web()), **section(cert="web_cert", is_proxied="web_proxy"))),
        log=Log(**section(format="log", levels="log_levels")),
        relay=Relaying(
            **section(enabled="relay", upload_bytes_per_second="relay_upload", circuits="relay_circuits")
        ),
        alerts=AlertSettings(**section(webhook="alert_webhook", command="alert_command")),
        follow=Follow(**section(key="follow", allow="follow_allow")),
    )
