"""Readers of settings: each turns a text that a person wrote into a value, or raises ValueError. Pure."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from crypto.contact import PORT_MAX, Address
from dht.work import WORK_BITS_MAX
from node.addresses import bare, read_own_address
from node.errors import UsageError
from node.paths import expand
from node.suggest import did_you_mean

CORES_MAX = 4_096
CIRCUITS_MAX = 1_024
"""Maximum number of circuits that an owner may allow as a relay; their sockets take half of a process's open
files."""
RELAY_BYTES_PER_SECOND = 1_250_000
"""10 Mbit/s, which a home connection can usually spare."""
RELAY_CIRCUITS = 64
"""Enough for two dozen nodes behind routers, each with a few neighbours. A circuit takes two open files."""
GUEST_BYTES_MAX = 16 << 30
"""The default disk space for data of others: enough for a share of a checkpoint of an 8B model with Adam."""

DEFAULT_WEB = Address("ip4", "127.0.0.1", 9748)


@dataclass(frozen=True)
class Relaying:
    """Whether this node, if others can reach it, relays traffic to peers that nobody can dial. `circuits` is
    the maximum number of simultaneous circuits, `upload_bytes_per_second` the limit for all of them together
    (0: no limit)."""

    enabled: bool = True
    upload_bytes_per_second: int = RELAY_BYTES_PER_SECOND
    circuits: int = RELAY_CIRCUITS


@dataclass(frozen=True)
class Web:
    """The daemon's page, and the HTTP API of models. If `address` is None, neither is served. If `address` is
    reachable from other machines, has a certificate or is behind a proxy, only the HTTP API is served there;
    the page stays on this machine."""

    address: Address | None = DEFAULT_WEB
    cert: Path | None = None
    is_proxied: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether clients other than this machine's programs can reach `address`."""
        address = self.address
        return address is not None and (
            self.is_proxied or self.cert is not None or not ip_address(address.host).is_loopback
        )


def read_web(text: str) -> Web:
    """Read the address at which the page and the HTTP API of models are served, or `off`."""
    if text == "off":
        return Web(None)
    return Web(read_listen(text.strip().removeprefix("http://").removeprefix("https://")))


def check_web(web: Web) -> Web:
    """Return `web` unchanged. Raises UsageError if clients' keys would be sent unencrypted, or if a
    certificate or proxy is set but nothing is served."""
    if web.address is None and (web.cert or web.is_proxied):
        flag = "--web-cert" if web.cert else "--web-proxy"
        raise UsageError(f"{flag} has no effect with --web off, because nothing is served", "--web HOST:PORT")
    if web.is_shared and not web.cert and not web.is_proxied:
        assert web.address is not None
        raise UsageError(
            f"--web {web.address}: clients' keys would be sent unencrypted beyond this machine",
            (
                "give --web-cert FILE (certificate and key, PEM), or --web-proxy if a "
                "proxy with TLS is in front of it"
            ),
        )
    return web


def read_listen(text: str) -> Address:
    """Read an address of this machine. Port 0 (any free port) is allowed here and nowhere else."""
    text = bare(text)
    any_port = re.fullmatch(r"((?:/ip6zone/[^/]+)?/ip[46]/[^/]+/(?:tcp|udp)/|.+:)0", text)
    address = read_own_address(any_port[1] + "1" if any_port else text)
    if address.kind not in ("ip4", "ip6"):
        raise ValueError("want an IP address of this machine, such as 0.0.0.0:9747")
    return replace(address, port=0) if any_port else address


def read_port(text: str) -> int:
    """Read a port to listen on. If it is in use, one of the next ports is taken."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= PORT_MAX):
        raise ValueError(f"want a whole number, 1 to {PORT_MAX}")
    return int(text)


def read_announce(text: str) -> Address:
    """Read an address that is announced to others."""
    address = read_own_address(text)
    if address.is_link_local:
        raise ValueError(
            "want an address that other machines can use; link-local addresses are "
            "announced by beacons on their link"
        )
    if address.host in ("0.0.0.0", "::"):  # noqa: S104 - compared
        raise ValueError(f"{address.host} stands for all addresses of a machine; give one of them")
    return address


def read_webhook(text: str) -> str:
    """Read a URL; an empty text means none."""
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("want a URL such as https://alerts.example/peerloom")
    return text


def read_command(text: str) -> tuple[str, ...]:
    """Read a program and its arguments, quoted as for a shell, although no shell runs them; an empty text
    means none."""
    command = tuple(shlex.split(text))
    if text and not command:
        raise ValueError("want a program and its arguments")
    return command


def read_work_bits(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= WORK_BITS_MAX):
        raise ValueError(f"want a whole number, 0 (none) to {WORK_BITS_MAX}")
    return int(text)


def read_cores(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= CORES_MAX):
        raise ValueError(f"want a whole number, 0 (all) to {CORES_MAX}")
    return int(text)


def read_circuits(text: str) -> int:
    """Read the maximum number of circuits that a relay carries at once."""
    if not (text.isascii() and text.isdigit() and int(text) <= CIRCUITS_MAX):
        raise ValueError(f"want a whole number, 0 to {CIRCUITS_MAX}")
    return int(text)


def read_device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", text):
        raise ValueError("want auto, cpu, cuda:0 or mps")
    return "cuda:0" if text == "cuda" else text


def read_switch(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False}
    words |= {"no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("want true or false")
    return words[text.lower()]


def one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"want one of {', '.join(words)}{did_you_mean(text, words)}")
        return text

    return read


def label(length_max: int, *, may_be_empty: bool = False) -> Callable[[str], str]:
    def read(text: str) -> str:
        if len(text) > length_max or not text.isprintable() or (text != text.strip()):
            raise ValueError(f"want at most {length_max} printable characters")
        if not text and not may_be_empty:
            raise ValueError("must not be empty")
        return text

    return read


def read_path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("want a path")
    return expanded(text)


def expanded(text: str) -> Path:
    """Return the path, with `~` replaced by the home folder. Raises ValueError if there is none."""
    try:
        return expand(text)
    except UsageError as error:
        raise ValueError(error.what) from error


def read_optional_path(text: str) -> Path | None:
    """Read a path; an empty text means None, as if the setting were absent."""
    return read_path(text) if text else None
