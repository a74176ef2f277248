"""The files of the page, read once: our own scripts and styles, and vendored ones with their licences, which
the tests check by hash. Nothing is loaded from elsewhere, so the page works offline.
"""

from hashlib import sha256
from html import escape
from http import HTTPStatus
from pathlib import Path

from node.invocation import elsewhere, program_from_anywhere
from node.web.door import Response, problem

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Assets:
    """Files by name. Other names are not looked up on the disk."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}
        for path in sorted(folder.rglob("*")):
            if path.suffix in _TYPES:
                data = path.read_bytes()
                if path.suffix == ".js" and path.parent == folder:
                    data = squeeze(data)
                if path.suffix == ".html":
                    data = _with_commands(data)
                tag = f'"{sha256(data).hexdigest()[:16]}"'
                self._files[path.relative_to(folder).as_posix()] = (data, _TYPES[path.suffix], tag)

    @property
    def script_bytes(self) -> int:
        """The total length of all scripts as served."""
        return sum(len(data) for name, (data, _, _) in self._files.items() if name.endswith(".js"))

    def serve(self, name: str, known: str | None) -> Response:
        """Serve a file, or only a status if the browser already has it, as its tag shows."""
        found = self._files.get(name)
        if found is None:
            return problem(HTTPStatus.NOT_FOUND, "there is nothing here")
        data, content_type, tag = found
        headers = (("etag", tag), ("cache-control", "no-cache"))
        if known == tag:
            return Response(b"", HTTPStatus.NOT_MODIFIED, content_type, headers)
        return Response(data, HTTPStatus.OK, content_type, headers)


def _with_commands(page: bytes) -> bytes:
    """Replace {program} and {elsewhere} with the way in which this node's user types commands."""
    for name, form in (("program", program_from_anywhere()), ("elsewhere", elsewhere())):
        page = page.replace(b"{%s}" % name.encode(), escape(form).encode())
    return page


def squeeze(script: bytes) -> bytes:
    """Return one of our scripts without indentation, comment lines and blanks next to punctuation, which a
    browser does not need.

    Strings, templates and patterns stay as they are, except for indentation within templates.
    """
    lines = (line.strip() for line in script.decode().split("\n"))
    return (
        _unblanked("\n".join(line for line in lines if line and not line.startswith("//"))).encode() + b"\n"
    )


_SIGNS = frozenset("{}()[];,:?=<>*&|!")
_BEFORE_PATTERN = frozenset("(,=:[!&|?{};\n")
"""A slash after one of these begins a pattern; elsewhere it divides."""


def _unblanked(text: str) -> str:
    out: list[str] = []
    depths: list[int] = []  # number of open braces, for each template whose code contains this position
    depth, at = 0, 0
    while at < len(text):
        char = text[at]
        if char in "\"'" or (char == "/" and (not out or out[-1][-1] in _BEFORE_PATTERN)):
            end = _end_of(text, at)
        elif char == "`" or (char == "}" and depth == 0 and depths):
            if char == "}":
                depth = depths.pop()
            end = _template_end(text, at + 1)
            if text[end - 1] == "{":
                depths.append(depth)
                depth = 0
        else:
            depth += (char == "{") - (char == "}")
            end = at + 1
            if char == " " and (out[-1][-1] in _SIGNS or text[end : end + 1] in _SIGNS):
                at = end
                continue
        out.append(text[at:end])
        at = end
    return "".join(out)


def _end_of(text: str, start: int) -> int:
    """Return the position after a string, or after a pattern, in which a slash may stand inside brackets."""
    closing, at, is_bracketed = text[start], start + 1, False
    while text[at] != closing or is_bracketed:
        if closing == "/" and text[at] in "[]":
            is_bracketed = text[at] == "["
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _template_end(text: str, at: int) -> int:
    """Return the position after a template's end, or after the `${` of code in it."""
    while text[at] != "`" and text[at : at + 2] != "${":
        at += 2 if text[at] == "\\" else 1
    return at + (1 if text[at] == "`" else 2)
