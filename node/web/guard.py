"""Access control for HTTP requests: pure rules over a request's headers, for `node.web.door`.

The page listens only on this machine, but a browser here also runs strangers' pages. Three rules keep those
out. The Host must name this machine, so a stranger's name that points at 127.0.0.1 (DNS rebinding) is
refused. A foreign Origin or Sec-Fetch-Site is refused, and no answer allows another origin (no CORS). Every
request that changes something, or shows members, paths and runs, needs the token, which neither a stranger's
page nor another user of this machine can read or guess. The page's own files and `/metrics` need none.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Any port is accepted: a forwarded one (`ssh -L`) differs."""
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
"""Headers of every answer: the page cannot be framed, read from another origin, or made to load foreign
files."""


@dataclass(frozen=True)
class RequestRefusal:
    """Why a request is not served."""

    status: HTTPStatus
    reason: str


def refuse_stranger(method: str, path: str, headers: Mapping[str, str]) -> RequestRefusal | None:
    """Return None for a request of this machine's own programs and pages.

    `headers` have names in lower case. A link from elsewhere may open the page, but none of its data.
    """
    host = headers.get("host", "")
    if _name(host) not in LOCAL_HOSTS:
        return RequestRefusal(
            HTTPStatus.MISDIRECTED_REQUEST, "this node answers to 127.0.0.1 and localhost only"
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
    """Return None for a program's request to a door beyond this machine: its key is in a header that a
    stranger's page cannot set. Requests of pages of any origin are refused."""
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        return RequestRefusal(HTTPStatus.FORBIDDEN, "programs are served, and no pages")
    return None


def refuse_action(headers: Mapping[str, str], token: str) -> RequestRefusal | None:
    """Return None for an action with the token. A form cannot set either header, so a form cannot act."""
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return RequestRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "want content-type: application/json")
    return refuse_reader(headers, {}, token)


def refuse_reader(headers: Mapping[str, str], query: Mapping[str, str], token: str) -> RequestRefusal | None:
    """Return None for a request with the token in its header, or in its query, since a browser's live stream
    and download have no custom headers. That address is never shown, and sent to nobody else."""
    given = headers.get(TOKEN_HEADER) or query.get("token", "")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
        return RequestRefusal(HTTPStatus.UNAUTHORIZED, "open the page with the line of: `peerloom page`")
    return None


def _name(host: str) -> str:
    """Return the host of a Host header, without its port."""
    if host.startswith("["):
        name, bracket, rest = host.partition("]")
        return name + bracket if not rest or rest.startswith(":") else ""
    name, colon, port = host.partition(":")
    return name.lower() if not colon or port.isdigit() else ""
