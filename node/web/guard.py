"""Access control for HTTP requests: pure rules over a request's headers, for `node.web.door`.

The page listens only on this machine, but a browser here also runs pages of other sites. Three rules keep
those out. The Host must name this machine, so a foreign name that points at 127.0.0.1 (DNS rebinding) is
refused. A foreign Origin or Sec-Fetch-Site is refused, and no answer allows a different origin (no CORS).
Every request that changes something, or shows members, paths and runs, needs the token, which neither a
foreign page nor another user of this machine can read or guess. The page's own files and `/metrics` need no
token.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of this machine in a Host header. Any port is accepted, because a forwarded port (`ssh -L`)
differs."""
TOKEN_HEADER = "x-peerloom-token"  # noqa: S105 - the name of a header
HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
)
"""Headers of every answer. The page cannot be framed, read from a different origin, or made to load foreign
files."""


@dataclass(frozen=True)
class RequestRefusal:
    """The reason why a request is not served."""

    status: HTTPStatus
    reason: str


def refuse_stranger(method: str, path: str, headers: Mapping[str, str]) -> RequestRefusal | None:
    """Return None for a request of this machine's own programs and pages, else the refusal.

    `headers` have names in lower case. A link on a foreign page may open the page, but gets none of its data.
    """
    host = headers.get("host", "")
    if _name(host) not in LOCAL_HOSTS:
        return RequestRefusal(
            HTTPStatus.MISDIRECTED_REQUEST, "this node answers only to the names 127.0.0.1 and localhost"
        )
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return RequestRefusal(HTTPStatus.FORBIDDEN, "pages of other origins are not served")
    site = headers.get("sec-fetch-site", "none")
    is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate" and not path.startswith("/api/")
    if site not in ("same-origin", "none") and not is_link:
        return RequestRefusal(HTTPStatus.FORBIDDEN, "pages of other origins are not served")
    return None


def refuse_elsewhere(_method: str, _path: str, headers: Mapping[str, str]) -> RequestRefusal | None:
    """Return None for a program's request to a door beyond this machine. A program has a key in a header that
    a foreign page cannot set. Requests of pages are refused, whatever their origin."""
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        return RequestRefusal(HTTPStatus.FORBIDDEN, "only programs are served here, not pages")
    return None


def refuse_action(headers: Mapping[str, str], token: str) -> RequestRefusal | None:
    """Return None for an action with the token. An HTML form can set neither header, so it cannot trigger an
    action."""
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return RequestRefusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the request needs content-type: application/json"
        )
    return refuse_reader(headers, {}, token)


def refuse_reader(headers: Mapping[str, str], query: Mapping[str, str], token: str) -> RequestRefusal | None:
    """Return None for a request with the token in its header or in its query. The query is needed because a
    browser's live stream and downloads have no custom headers; such an address is never shown, and sent only
    to this node."""
    given = headers.get(TOKEN_HEADER) or query.get("token", "")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
        return RequestRefusal(
            HTTPStatus.UNAUTHORIZED, ("open the page with the link that `peerloom page` prints")
        )
    return None


def _name(host: str) -> str:
    """Return the host of a Host header, without its port."""
    if host.startswith("["):
        name, bracket, rest = host.partition("]")
        return name + bracket if not rest or rest.startswith(":") else ""
    name, colon, port = host.partition(":")
    return name.lower() if not colon or port.isdigit() else ""
