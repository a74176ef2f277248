"""Parses addresses as people type and paste them, from a screen, a chat, a mail, a browser or a shell.

It strips surrounding text that cannot be part of an address, and names each fault in one line. Only people's
input is parsed this leniently: addresses from peers go to `crypto.contact.parse_address`, which is strict. No
I/O.
"""

import re
import unicodedata
from ipaddress import IPv6Address, ip_address

from crypto.contact import ADDRESS_LENGTH_MAX, Address, parse_address

DEFAULT_PORT = 9747
PORT_DIGITS_MIN = 4
"""Minimum number of digits after the last colon of an unbracketed IPv6 address that is taken for a port. A
shorter group belongs to the address."""
WORD_LENGTH_MAX = 2 * ADDRESS_LENGTH_MAX
"""Maximum length of a word: an address with the text around it. Longer words are rejected without parsing."""
SHOWN_LENGTH_MAX = 60
"""Maximum length of one of several addresses that an error quotes."""
_WANT = "want HOST:PORT, or [IPV6]:PORT, or a multiaddr such as /ip4/10.0.0.5/tcp/9747"
_QUOTES = "\"'`\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u00ab\u00bb\u2039\u203a"
_DASHES = {ord(dash): "-" for dash in "\u2010\u2011\u2012\u2013\u2212"} | {ord("\u2014"): "--"}
"""Chat programs replace the two hyphens of a flag with a long dash."""
_BEHIND = ".,;!?/"
"""Characters that a sentence, a list or a browser puts after an address."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OURS = ("tcp", "udp", "peerloom")
_JOIN = re.compile(r"-{1,2}join(?:=(.*))?")
_PROMPT = re.compile(
    r"[\$#>%]|on|another|this|machine:|(?:\S*/)?peerloom|(?:\S*/)?python[0-9.]*|-m|node", re.IGNORECASE
)
"""The words before `--join` in the line that our own screens print for copying."""

_REMARK = re.compile(r"(?<=\w)\s+\([^()]*\)|^\s*listening\s+")


def read_addresses(text: str) -> tuple[Address, ...]:
    """Return the addresses in `text`: one or several, separated by commas or blanks, or a whole command line
    with `--join`.

    An address without a port gets port 9747. Raises ValueError with a message for the user.
    """
    words = _without_command(_words(_without_remarks(text)))
    if not words:
        raise ValueError(_WANT)
    found = []
    for word in words:
        try:
            found.append(_read(word, DEFAULT_PORT))
        except ValueError as error:
            raise ValueError(
                f"'{word[:SHOWN_LENGTH_MAX]}': {error}" if len(words) > 1 else str(error)
            ) from None
    return tuple(dict.fromkeys(found))


def read_address(text: str) -> Address:
    """Return the one address in `text`, an address of another machine. Raises ValueError with a message for
    the user."""
    found = read_addresses(text)
    if len(found) > 1:
        raise ValueError("want one address")
    return found[0]


def read_own_address(text: str) -> Address:
    """Return the one address in `text`, which this machine will listen on: it needs a port, and may stand for
    all networks of the machine.

    Raises ValueError with a message for the user.
    """
    words = _words(text)
    if len(words) != 1:
        raise ValueError("want one address" if words else _WANT)
    return _read(words[0], None, is_own=True)


def clean(text: str) -> str:
    """Return `text` with invisible characters removed, and with plain digits, dashes and blanks."""
    visible = "".join(
        " " if unicodedata.category(letter) in ("Zs", "Zl", "Zp", "Cc") else letter
        for letter in text.translate(_DASHES)
        if unicodedata.category(letter) != "Cf"
    )
    wide = unicodedata.normalize("NFKC", visible)
    return "".join(str(unicodedata.digit(letter, letter)) for letter in wide).strip()


def bare(text: str) -> str:
    """Return one word without surrounding quotes, brackets, full stops and our own URL schemes.

    Raises ValueError if the word is too long to contain an address.
    """
    word = clean(text)
    if len(word) > WORD_LENGTH_MAX:
        raise ValueError(f"an address has at most {ADDRESS_LENGTH_MAX} characters")
    while True:
        inner = word.strip(_QUOTES + " ").rstrip(_BEHIND)
        for opening, closing in ("<>", "()", "{}"):
            inner = inner.removeprefix(opening).removesuffix(closing)
        scheme = _SCHEME.match(inner)
        if scheme is not None and scheme[1].lower() in _OURS:
            inner = inner[scheme.end() :]
        if inner == word:
            return word
        word = inner


def _words(text: str) -> list[str]:
    joined = re.sub(r"(?<=\S) +: +(?=\S)", ":", clean(text))
    return [word for each in re.split(r"[,;|\s]+", joined) if (word := bare(each))]


def _without_remarks(text: str) -> str:
    """Return `text` without the label of a line that our own screens print, and without remarks in
    parentheses."""
    rest = _REMARK.sub(" ", text)
    return rest if rest.strip() else text


def _without_command(words: list[str]) -> list[str]:
    """Return the addresses of a pasted command line, or `words` itself if it is not a command line."""
    places = [number for number, word in enumerate(words) if _JOIN.fullmatch(word)]
    if not places:
        return words
    before = [word for word in words[: places[0]] if not _PROMPT.fullmatch(word)]
    found = []
    for word in words[places[0] :]:
        flag = _JOIN.fullmatch(word)
        if flag is None:
            found.append(word)
        elif flag[1]:
            found.append(bare(flag[1]))
    others = [*before, *(word for word in found if word.startswith("-"))]
    if others:
        other = others[0][:SHOWN_LENGTH_MAX]
        raise ValueError(
            f"this is a whole command; give only its address here, and type '{other}' separately"
        )
    return found


def _read(word: str, default_port: int | None, *, is_own: bool = False) -> Address:
    if word.startswith("/"):
        return _checked(parse_address(word), is_own=is_own)
    scheme = _SCHEME.match(word)
    if scheme is not None:
        raise ValueError(_other_scheme(scheme[1].lower(), word[scheme.end() :]))
    if not word.startswith("[") and word.count(":") > 1:
        raise ValueError(_without_brackets(word))
    if re.fullmatch(r"\[[^\]]*\]", word) or ":" not in word:
        if word.isdigit():
            own = f"127.0.0.1:{word} for this machine alone, or 0.0.0.0:{word}"
            example = own if is_own else f"10.0.0.5:{word}"
            raise ValueError(f"this is only a port; add its host, such as {example}")
        if default_port is None:
            raise ValueError(_WANT)
        word = f"{word}:{default_port}"
    elif word.startswith(":"):
        raise ValueError(f"the host before '{word[:SHOWN_LENGTH_MAX]}' is missing")
    elif word.endswith(":"):
        raise ValueError(f"the port after the colon is missing; it is {DEFAULT_PORT} by default")
    elif "/" in word:
        raise ValueError(f"nothing may follow the port: {word.partition('/')[0][:SHOWN_LENGTH_MAX]}")
    return _checked(parse_address(word), is_own=is_own)


def _checked(address: Address, *, is_own: bool) -> Address:
    """Return the address. Raises ValueError if no machine can have its host, which must be a typing error."""
    host = address.host.partition("%")[0]
    last = host.rstrip(".").rpartition(".")[2]
    if address.kind == "dns" and last.isdigit():
        raise ValueError(f"'{host}' is not an IPv4 address, which has four numbers from 0 to 255")
    if not is_own and address.kind.startswith("ip") and ip_address(host).is_unspecified:
        raise ValueError(f"{host} stands for all addresses of a machine; give one of them")
    return address


def _other_scheme(scheme: str, rest: str) -> str:
    if scheme not in ("http", "https"):
        return f"'{scheme}://' is not an address of a node; {_WANT}"
    host = re.match(r"\[[^\]]*\]|[^:/?#]*", rest)
    name = (host[0][:SHOWN_LENGTH_MAX] if host is not None else "") or "HOST"
    port = f"whose port is {DEFAULT_PORT} by default"
    return f"this is the address of a web page; give the node's, {port}: {name}:{DEFAULT_PORT}"


def _without_brackets(word: str) -> str:
    """Return an error text for a word with several colons; it suggests how an IPv6 address in it was probably
    meant."""
    host, _, port = word.rpartition(":")
    if _is_ipv6(host) and port.isdigit() and len(port) >= PORT_DIGITS_MIN:
        meant = f"[{host}]:{port}"
    elif _is_ipv6(word):
        meant = f"[{word}]:{DEFAULT_PORT}"
    else:
        return _WANT
    return f"an IPv6 address stands in brackets: {meant}"


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True
