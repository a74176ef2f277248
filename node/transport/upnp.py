"""The part of UPnP that maps a router's port: it writes and reads packets and documents. No I/O.

After UPnP Device Architecture 1.1 (SSDP, SOAP) and the services WANIPConnection 1 and 2 and WANPPPConnection.
A router's data is not trusted: a document is read up to a limit, without entities, and may name only the
router's own host. `upnp_driver` has the sockets and the times.
"""

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urljoin, urlsplit
from xml.parsers import expat
from xml.sax.saxutils import escape

SSDP_GROUP, SSDP_PORT = "239.255.255.250", 1_900
SEARCH_BYTES_MAX = 2_048
"""Maximum size of an answer to a search; real ones have 300 to 600 bytes."""
DESCRIPTION_BYTES_MAX = 2**17
"""Maximum size of the description of a router and its services; real ones have 3 to 20 kB."""
ANSWER_BYTES_MAX = 2**14
"""Maximum size of the answer to a call."""
HEAD_BYTES_MAX = 2**13
"""Maximum size of the head of an HTTP answer."""
DEPTH_MAX = 32
ELEMENTS_MAX = 4_096
"""Maximum number of elements in a document; a description has some hundred."""
URL_MAX = 1_024
SERVICES = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
"""The services that map ports, the best first."""
ROUTER = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
"""The device type that is searched for; routers of version 2 answer to it as well."""

CONFLICT, PERMANENT_ONLY = 718, 725
"""Error codes: another machine has the port; the router supports only permanent mappings."""
_REASONS = {
    401: "it does not support the call",
    402: "it does not accept the arguments",
    501: "it failed",
    606: "not authorised",
    716: "it does not map a port for all hosts",
    CONFLICT: "another machine has the port",
    724: "it maps a port only to the same port number",
    PERMANENT_ONLY: "it makes only permanent mappings",
    728: "no more mappings",
}


class UpnpFault(Exception):
    """A router's answer is malformed, or it refuses. The text is for people; `code` is the router's own code,
    or 0 if there is none."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class ControlPoint:
    """The URL that controls a router's port mappings."""

    host: str
    port: int
    path: str
    service: str


def search() -> bytes:
    """Return a search request for routers."""
    lines = (
        "M-SEARCH * HTTP/1.1",
        f"HOST: {SSDP_GROUP}:{SSDP_PORT}",
        'MAN: "ssdp:discover"',
        "MX: 1",
        f"ST: {ROUTER}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def location(data: bytes, router: str) -> tuple[int, str]:
    """Return the port and path of the description that an answer to a search names. Raises UpnpFault if it is
    not such an answer, or names a host different from the router."""
    if len(data) > SEARCH_BYTES_MAX:
        raise UpnpFault("its answer to a search is too long")
    first, *lines = data.decode("latin-1").split("\r\n")
    if not first.startswith("HTTP/1.") or first.split()[1:2] != ["200"]:
        raise UpnpFault("it does not answer a search")
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "location":
            return _own_url(value.strip(), router)
    raise UpnpFault("its answer to a search has no location")


def control_point(document: bytes, router: str, port: int, path: str) -> ControlPoint:
    """Return the control point in a router's description, which was read from `port` and `path`. Raises
    UpnpFault."""
    base, kind = f"http://{router}:{port}{path}", ""
    found: dict[str, str] = {}
    for name, text in _texts(document, DESCRIPTION_BYTES_MAX):
        if name == "URLBase" and text:
            base = text
        elif name == "serviceType":
            kind = text
        elif name == "controlURL" and kind in SERVICES:
            found.setdefault(kind, text)
            kind = ""
    for service in SERVICES:
        if service in found:
            own_port, own_path = _own_url(found[service], router, base)
            return ControlPoint(router, own_port, own_path, service)
    raise UpnpFault("it maps no ports by UPnP")


def call(point: ControlPoint, action: str, arguments: Iterable[tuple[str, object]]) -> bytes:
    """Return the body of a call."""
    inner = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in arguments)
    return (
        '<?xml version="1.0"?>\r\n'
        '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
        f'<u:{action} xmlns:u="{point.service}">{inner}</u:{action}>'
        "</s:Body></s:Envelope>\r\n"
    ).encode()


def mapping_arguments(
    transport: str, outer: int, inner: int, host: str, seconds: int
) -> tuple[tuple[str, object], ...]:
    """Return the arguments of AddPortMapping."""
    return (
        ("NewRemoteHost", ""),
        ("NewExternalPort", outer),
        ("NewProtocol", transport.upper()),
        ("NewInternalPort", inner),
        ("NewInternalClient", host),
        ("NewEnabled", 1),
        ("NewPortMappingDescription", "peerloom"),
        ("NewLeaseDuration", seconds),
    )


def unmapping_arguments(transport: str, outer: int) -> tuple[tuple[str, object], ...]:
    """Return the arguments of DeletePortMapping."""
    return (("NewRemoteHost", ""), ("NewExternalPort", outer), ("NewProtocol", transport.upper()))


def answer(status: int, document: bytes) -> dict[str, str]:
    """Return a call's results by name. Raises UpnpFault if the router refused, or sent something that is not
    an answer."""
    texts = dict(_texts(document, ANSWER_BYTES_MAX))
    if status == 200:
        return texts
    code = texts.get("errorCode", "")
    if not code.isdecimal() or len(code) > 4:
        raise UpnpFault(f"HTTP status {status}")
    raise UpnpFault(_REASONS.get(int(code), f"UPnP error {int(code)}"), int(code))


def external_host(texts: dict[str, str]) -> str:
    """Return the external address that GetExternalIPAddress has returned. Raises UpnpFault."""
    try:
        return str(ipaddress.IPv4Address(texts.get("NewExternalIPAddress", "")))
    except ValueError:
        raise UpnpFault("it does not report its own address") from None


def _own_url(url: str, router: str, base: str = "") -> tuple[int, str]:
    """Return the port and path of a URL on the router itself; the URL may be relative to `base`. Raises
    UpnpFault."""
    try:
        url = urljoin(base, url)
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        raise UpnpFault("it names an address that is no URL") from None
    if len(url) > URL_MAX or not url.isascii() or any(each <= " " for each in url):
        raise UpnpFault("it names an address that is no URL")
    if parts.scheme != "http" or parts.hostname != router or parts.username is not None:
        raise UpnpFault("it names an address on another machine")
    path = parts.path or "/"
    return port, f"{path}?{parts.query}" if parts.query else path


def _texts(document: bytes, bytes_max: int) -> Iterator[tuple[str, str]]:
    """Yield the name, without its namespace, and the text of each element without child elements, in order.
    Raises UpnpFault if the document is too long, is not XML, or has a document type, which could define
    entities."""
    if len(document) > bytes_max:
        raise UpnpFault(f"it sent more than {bytes_max >> 10} KiB")
    found: list[tuple[str, str]] = []
    open_names: list[str] = []
    pieces: list[str] = []
    count = 0

    def begin(name: str, _attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if len(open_names) >= DEPTH_MAX or count > ELEMENTS_MAX:
            raise UpnpFault("it sent a document with too many elements")
        open_names.append(name.rpartition(":")[2])
        pieces.clear()

    def end(_name: str) -> None:
        name = open_names.pop()
        if pieces:
            found.append((name, "".join(pieces).strip()))
        pieces.clear()

    def refuse(*_arguments: object) -> NoReturn:
        raise UpnpFault("it sent a document with a document type")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler = pieces.append
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    parser.ExternalEntityRefHandler = refuse
    try:
        parser.Parse(document, True)
    # the last two come from the encoding that the document names
    except (expat.ExpatError, ValueError, LookupError):
        raise UpnpFault("it sent a document that is not XML") from None
    return iter(found)
