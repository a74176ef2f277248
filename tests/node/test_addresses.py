"""Addresses in the forms that people type and paste. Unambiguous text is parsed; other text is refused with a
one-line error."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import node
from crypto.contact import Address, make_address, parse_address
from node.addresses import read_address, read_addresses
from node.config import Config, read_web, resolve
from node.errors import UsageError
from node.main import run
from tests.installed import console_script, typed

LAB = parse_address("10.0.0.5:9747")
HOME = parse_address("[::1]:9747")


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.5:9747/",
        " 10.0.0.5:9747 ",
        "10.0.0.5",
        "tcp://10.0.0.5:9747",
        "tcp://10.0.0.5:9747/",
        "'10.0.0.5:9747'",
        "\u201c10.0.0.5:9747\u201d",
        "`10.0.0.5:9747`.",
        "<10.0.0.5:9747>",
        "10.0.0.5:9747,",
        "10.0.0.5:9747.",
        "10.0.0.5 : 9747",
        "10.0.0.5\u200b:9747",
        "\ufeff10.0.0.5:9747\r\n",
        "\u00a010.0.0.5:9747\u00a0",
        "\uff11\uff10.0.0.5\uff1a9747",
        "\u0661\u0660.\u0660.\u0660.\u0665:\u0669\u0667\u0664\u0667",
        "/ip4/10.0.0.5/tcp/9747/",
        "peerloom --join 10.0.0.5:9747",
        "python -m node --join 10.0.0.5:9747",
        ".venv/bin/python3 -m node --join=10.0.0.5:9747",
        "$ .venv/bin/peerloom --join '10.0.0.5:9747'",
        "  On another machine:  peerloom --join 10.0.0.5:9747",
        "peerloom \u2014join 10.0.0.5:9747",
        "--join 10.0.0.5:9747",
    ],
)
def test_an_address_is_parsed_from_pasted_text(text: str) -> None:
    assert read_addresses(text) == (LAB,)


def test_hosts_of_each_kind_may_be_given_without_a_port() -> None:
    assert read_addresses("[::1]") == (HOME,)
    assert read_addresses("localhost lab-5.example:1, [fe80::1%eth0]") == (
        parse_address("localhost:9747"),
        parse_address("lab-5.example:1"),
        parse_address("[fe80::1%eth0]:9747"),
    )
    lab = (parse_address("10.0.0.5:9747"),)
    assert read_addresses("10.0.0.5:9747 (lab)") == read_addresses("(10.0.0.5:9747)") == lab
    assert read_addresses("  listening   10.0.0.5:9747   (port 9747 was taken)") == lab
    assert read_addresses("my\u2011host") == (parse_address("my-host:9747"),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "http://10.0.0.5:9748",
            "this is the address of a web page; give the node's, whose port is 9747 by default",
        ),
        ("https://[::1]:9748/#token=1", r"default: \[::1\]:9747"),
        ("ssh://10.0.0.5", "'ssh://' is not an address of a node"),
        ("fe80::1%eth0:9747", r"an IPv6 address stands in brackets: \[fe80::1%eth0\]:9747"),
        ("::1:9747", r"brackets: \[::1\]:9747"),
        ("2001:db8::7", r"brackets: \[2001:db8::7\]:9747"),
        ("a:b:c", "want HOST:PORT"),
        ("9747", "this is only a port; add its host"),
        (":9747", "the host before ':9747' is missing"),
        ("10.0.0.5:", "the port after the colon is missing; it is 9747 by default"),
        ("10.0.0.5:0", "port must be 1-65535"),
        ("10.0.0.5:97470", "port must be 1-65535"),
        ("10.0.0.5:9747/path", "nothing may follow the port: 10.0.0.5:9747"),
        ("10.0.0.256", "'10.0.0.256' is not an IPv4 address"),
        ("10.0.0.256:9747", "'10.0.0.256' is not an IPv4 address"),
        ("0.0.0.0:9747", "0.0.0.0 stands for all addresses of a machine; give one of them"),
        ("10.0.0.5 9747", "'9747': this is only a port"),
        ("10.0.0.5:1,10.0.0.6:0", "'10.0.0.6:0': port must be 1-65535"),
        ("user@lab:9747", "'user@lab' is not a host name"),
        ("l\u0430b:9747", "is not a host name"),
        ("peerloom --join 10.0.0.5 --swarm lab", "a whole command; .* type '--swarm' separately"),
        ("PEERLOOM_KEY_FILE=k peerloom --join a", "type 'PEERLOOM_KEY_FILE=k' separately"),
        ("peerloom --join", "want HOST:PORT"),
        (" \u200b", "want HOST:PORT"),
        ("(" * 100_000, "an address has at most 200 characters"),
    ],
)
def test_an_unreadable_address_is_refused_with_its_reason(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_addresses(text)


HOSTS = st.one_of(
    st.ip_addresses(v=4).filter(lambda ip: not ip.is_unspecified).map(str),
    st.ip_addresses(v=6).filter(lambda ip: not ip.is_unspecified).map(str),
    st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z](\.[a-z]{2,8}){0,2}", fullmatch=True),
)
ADDRESSES = st.builds(make_address, HOSTS, st.integers(1, 65_535))
BLANKS = [" ", "\t", "\r\n", "\u200b", "\ufeff", "\u00a0"]
BEFORE = st.lists(st.sampled_from([*BLANKS, "'", '"', "\u201c", "<", "("]))
SCHEMES = st.sampled_from(["", "tcp://", "UDP://"])
BEHIND = st.lists(st.sampled_from([*BLANKS, "'", '"', "\u201d", ">", ")", "/", ".", ",", ";"]))
SAID_LENGTH_MAX = 600
"""Return the two parts of an error: the beginning of the typed text, and the reason."""


@given(address=ADDRESSES, before=BEFORE, behind=BEHIND, scheme=SCHEMES, is_multiaddr=st.booleans())
def test_an_address_is_found_within_surrounding_text(
    address: Address, before: list[str], behind: list[str], scheme: str, is_multiaddr: bool
) -> None:
    text = str(address) if is_multiaddr else f"{scheme}{address.short}"
    assert read_address(f"{''.join(before)}{text}{''.join(behind)}") == address


@given(text=st.text(max_size=300) | st.text("0123456789abcdef.:[]/%-@, \u2014\u200bjoin", max_size=60))
def test_garbage_is_refused_with_a_one_line_error(text: str) -> None:
    said = ""
    try:
        resolve({"join": [text]}, {})
    except UsageError as error:
        said = error.what
    assert len(said.splitlines()) <= 1
    assert len(said) < SAID_LENGTH_MAX


def test_every_source_of_seeds_accepts_several_pasted_addresses(tmp_path: Path) -> None:
    (tmp_path / "seeds.txt").write_bytes(
        b"\xef\xbb\xbf10.0.0.1:9747\r\n# a comment\r\n10.0.0.2, 10.0.0.3:1\r\n\xe2\x80\x8b\r\n"
    )
    (tmp_path / "node.toml").write_bytes(
        b"\xef\xbb\xbf[join]\r\nseeds = ['tcp://10.0.0.4:9747/ 10.0.0.5']\r\nseed_files = ['seeds.txt']\r\n"
    )
    environ = {"PEERLOOM_JOIN": "peerloom --join 10.0.0.6"}
    flags = {"join": ["10.0.0.7:9747,10.0.0.8"], "config": str(tmp_path / "node.toml")}
    assert [seed.short for seed in resolve(flags, environ).join.seeds] == [
        *(f"10.0.0.{number}:9747" for number in (7, 8, 6, 4, 5, 1, 2)),
        "10.0.0.3:1",
    ]
    (tmp_path / "wide.txt").write_bytes("10.0.0.1:9747".encode("utf-16"))
    with pytest.raises(UsageError, match=r"wide.txt:1: not UTF-8 text; it is UTF-16: save it as UTF-8"):
        resolve({"seed_files": [str(tmp_path / "wide.txt")]}, {})


def test_listen_and_page_options_accept_pasted_addresses(tmp_path: Path) -> None:
    settings = resolve({"listen": [" 'tcp://0.0.0.0:0/' "], "announce": ["lab.example:1."]}, {})
    assert [each.short for each in settings.listen.addresses] == ["0.0.0.0:0"]
    assert [each.short for each in settings.listen.announce] == ["lab.example:1"]
    assert read_web(" http://127.0.0.1:9748/ ").address == parse_address("127.0.0.1:9748")
    with pytest.raises(UsageError, match=r"--listen 10\.0\.0\.5: want HOST:PORT"):
        resolve({"listen": ["10.0.0.5"]}, {})


def test_a_program_may_join_by_pasted_addresses() -> None:
    made = node.Node(Config(), join="10.0.0.5, [::1]:9747/")
    assert made._seeds.seeds == (LAB, HOME)
    with pytest.raises(UsageError, match="join: 9747: this is only a port"):
        node.Node(Config(), join=["9747"])


def test_a_refused_address_ends_the_command_with_status_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--join", "http://10.0.0.5:9748", "--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --join http://10.0.0.5:9748: this is the address of a web page; give the node's, "
        "whose port is 9747 by default: 10.0.0.5:9747"
    ]
    script = console_script(tmp_path / "bin")
    said = typed("peerloom doctor '::1:9747' ", tmp_path, [script.parent])
    assert said.returncode == 2
    assert said.stderr == ("error: doctor ::1:9747: an IPv6 address stands in brackets: [::1]:9747\n")
