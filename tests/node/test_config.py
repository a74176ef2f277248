"""Strict TOML, and how flags, the environment, a file and defaults are merged into one config."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import parse_address
from node import toml
from node.config import Config, read_listen, resolve
from node.errors import UsageError
from node.quantities import Memory, read_memory
from node.suggest import nearest


class Inner(msgspec.Struct, frozen=True):
    seeds: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    kind: Literal["lan", "wan"] = "lan"
    rate: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None


class Outer(msgspec.Struct, frozen=True):
    must: Annotated[int, msgspec.Meta(ge=1, le=5)]
    join: Inner = Inner()
    parts: tuple[Inner, ...] = ()


FAULTS = [
    ("must=1\n[join]\nseed = 1", "f.toml:3: unknown key 'seed' in [join]; did you mean 'seeds'?"),
    ("must=1\njoin.seed = 1", "f.toml:2: unknown key 'seed' in [join]; did you mean 'seeds'?"),
    ("mist = 1", "f.toml:1: unknown key 'mist'; did you mean 'must'?"),
    ("\nmust = 9", "f.toml:2: must = 9: want a whole number, 1 to 5"),
    ("must = true", "f.toml:1: must = true: want a whole number, 1 to 5"),
    ("must = 1\n[join]\nkind = 'wlan'", 'f.toml:3: join.kind = "wlan": want one of "lan", "wan"'),
    (
        "must = 1\n[join]\nrate = 1",
        "f.toml:3: join.rate = 1: want a finite number, more than 0 and less than 1",
    ),
    ("must = 1\n[join]\nrate = nan", "f.toml:3: join.rate = NaN: want a finite number"),
    ("must=1\n[join]\nseeds = [\n 'a', # ]\n '''b\nc''',\n 3]", "f.toml:7: join.seeds[2] = 3: want text"),
    ("must = 1\njoin = {kind = 7}", "f.toml:2: join.kind = 7: want one of"),
    ("must = 1\njoin = 3", "f.toml:2: join = 3: want a table, [join]"),
    ("must = 1\n[[parts]]\n[[parts]]\nkind = 1", "f.toml:4: parts.kind = 1: want one of"),
    ("[join]\nkind = 'lan'", "f.toml: lacks the key 'must'"),
    ("must = ", "f.toml:1: not TOML: "),
    ("must = 1\nmust = 2", "f.toml:2: not TOML: "),
    ("a = " + "[" * 5_000, "f.toml"),
    ("must = '\u202e\x9b'", "f.toml:1: must = "),
]


@pytest.mark.parametrize(("text", "message"), FAULTS)
def test_an_error_in_a_file_names_line_key_value_and_limits(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        toml.parse(text, Outer, name="f.toml")
    assert caught.value.what.startswith(message)
    assert caught.value.what.isprintable()


def test_a_valid_file_becomes_its_struct() -> None:
    text = "must = 2\n[join]\nseeds = ['a']\nrate = 0.5\n[[parts]]\nkind = 'wan'\n"
    document = toml.parse(text, Outer, name="f.toml")
    assert document.value == Outer(2, Inner(("a",), rate=0.5), (Inner(kind="wan"),))
    assert document.where("parts", 0, "kind") == "f.toml:6"
    assert document.where("nowhere") == "f.toml"


def test_an_unreadable_file_is_reported_with_its_path(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = 1\n\xff")
    for path, reason in (
        (tmp_path / "none.toml", "no such file"),
        (tmp_path, "is a directory"),
        (binary, "2: not UTF-8"),
    ):
        with pytest.raises(UsageError, match=reason):
            toml.load(path, Outer)


_KEYS = st.text("ab-", min_size=1, max_size=3) | st.sampled_from(['"a.b"', "'#'", '"["'])
_VALUES = st.sampled_from(
    [
        "1",
        '"x # y"',
        "'[t]'",
        '"""\n[a]\nb = 1\n""""',
        "'''\nq''q\n'''",
        "[\n 1, # ]\n [2],\n]",
        "{a = 1, b = [2]}",
        r'"\" \\"',
        "1979-05-27",
        '"""a\\"""b"""',
    ]
)


@given(
    st.lists(st.tuples(_KEYS, _VALUES), max_size=6, unique_by=lambda pair: pair[0].strip("\"'")),
    st.booleans(),
)
def test_the_line_of_every_key_is_known(pairs: list[tuple[str, str]], windows: bool) -> None:
    text, expected = "[table] # t = 1\n", {}
    for key, value in pairs:
        expected[key.strip("\"'")] = text.count("\n") + 1
        text += f"{key} = {value} # tail = 1\n"
    lines = toml.line_numbers(text.replace("\n", "\r\n") if windows else text)
    assert {path[1]: line for path, line in lines.items() if len(path) == 2} == expected


def test_a_config_without_any_input_has_all_values() -> None:
    config = resolve({}, {})
    assert config.join.seeds == ()
    listen = [str(address) for address in config.listen.addresses]
    assert listen == ["/ip4/0.0.0.0/tcp/9747", "/ip6/::/tcp/9747"]
    assert (config.swarm.name, config.swarm.preset, config.resources.device) == ("default", "lan", "auto")
    assert config.data_dir.parts[-2:] == ("peerloom", "default")
    assert 1 <= len(config.name) <= 40


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("name = 'file'\n[swarm]\nname = 'file'\npreset = 'wan'\n[resources]\ncores = 3\n")
    environ = {"PEERLOOM_NAME": "environment", "PEERLOOM_SWARM": "environment"}
    config = resolve({"config": str(file), "name": "flag"}, environ)
    assert (config.name, config.swarm.name, config.swarm.preset) == ("flag", "environment", "wan")
    assert config.resources.cores == 3


def test_seeds_from_all_sources_are_tried_once_each(tmp_path: Path) -> None:
    (tmp_path / "seeds.txt").write_text("# ours\n10.0.0.3:1 # old\n\n10.0.0.1:1\n")
    file = tmp_path / "node.toml"
    file.write_text("join = {seeds = ['10.0.0.2:1'], seed_files = ['seeds.txt'], remember = false}\n")
    config = resolve({"config": str(file), "join": ["10.0.0.1:1"]}, {"PEERLOOM_JOIN": "10.0.0.1:1,[::1]:2"})
    assert [seed.short for seed in config.join.seeds] == ["10.0.0.1:1", "[::1]:2", "10.0.0.2:1", "10.0.0.3:1"]
    assert config.join.remember is False


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("data_dir = 'data'\nobserver = true\n")
    config = Config.load(file)
    assert config.data_dir == tmp_path / "data"
    assert config.observer


BAD_VALUES = [
    ({"join": ["10.0.0.5:99999"]}, {}, "--join 10.0.0.5:99999: port must be 1-65535"),
    ({"join": ["10.0.0.5:"]}, {}, "--join 10.0.0.5:: the port after the colon is missing"),
    ({}, {"PEERLOOM_JOIN": "a:0"}, "PEERLOOM_JOIN: a:0: port must be 1-65535"),
    ({"listen": ["lab.example:9747"]}, {}, "--listen lab.example:9747: want an IP address"),
    ({"memory": "12 bananas"}, {}, "--memory 12 bananas: want an amount such as 12GB"),
    ({"memory": "180%"}, {}, "--memory 180%: want an amount"),
    ({"cores": "-1"}, {}, "--cores -1: want a whole number, 0 (all) to 4096"),
    ({"device": "gpu"}, {}, "--device gpu: want auto, cpu, cuda:0 or mps"),
    ({"preset": "vlan"}, {}, "--preset vlan: want one of lan, wan, host, local; did you mean 'lan'?"),
    ({"name": "x" * 41}, {}, "--name " + "x" * 41 + ": want at most 40"),
    ({"name": "a\x1b[2J"}, {}, '--name "a\\u001b[2J": want at most 40 printable'),
    ({"swarm": ""}, {}, '--swarm "": must not be empty'),
    ({}, {"PEERLOOM_OBSERVER": "maybe"}, "PEERLOOM_OBSERVER: maybe: want true or false"),
    (
        {},
        {"PEERLOOM_JION": "a:1"},
        "unknown variable PEERLOOM_JION in the environment; did you mean PEERLOOM_JOIN?",
    ),
]


@pytest.mark.parametrize(("flags", "environ", "message"), BAD_VALUES)
def test_a_bad_value_is_reported_with_its_source(
    flags: dict[str, str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(flags, environ)
    assert caught.value.what.startswith(message)


def test_a_bad_address_in_a_file_names_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[join]\nseeds = [\n  '10.0.0.5:1',\n  '10.0.0.5:0',\n]\n")
    with pytest.raises(UsageError, match=r"node.toml:4: seeds 10.0.0.5:0: port must be"):
        resolve({"config": str(file)}, {})
    (tmp_path / "seeds.txt").write_text("\n10.0.0.5:1\nno/sense\n")
    with pytest.raises(UsageError, match=r"seeds.txt:3: no/sense: 'no/sense' is not a host name"):
        resolve({"seed_files": [str(tmp_path / "seeds.txt")]}, {})


def test_unrelated_variables_are_ignored() -> None:
    resolve({}, {"PEERLOOM_SERVICE_HOST": "10.1.1.1", "PEERLOOM_PORT": "tcp://10.1.1.1:9747"})


def test_amounts_and_durations_are_read_with_their_units() -> None:
    assert read_memory("12GB") == Memory(bytes=12_000_000_000)
    assert read_memory("1.5 GiB").of(10**12) == 1_610_612_736
    assert read_memory("80%").of(1000) == 800
    assert Memory(bytes=10**12).of(5) == 5


def test_port_zero_is_allowed_for_listening_but_not_for_joining() -> None:
    for text in ("127.0.0.1:0", "[::1]:0", "/ip4/127.0.0.1/tcp/0"):
        assert read_listen(text).port == 0
        with pytest.raises(ValueError, match="port must be"):
            parse_address(text)


def test_a_port_given_with_listen_is_never_replaced() -> None:
    assert resolve({}, {}).listen.may_move
    assert not resolve({"listen": ["127.0.0.1:9747"]}, {}).listen.may_move
    assert not resolve({}, {"PEERLOOM_LISTEN": "127.0.0.1:9747"}).listen.may_move


def test_a_port_given_alone_listens_on_all_addresses_and_may_change() -> None:
    found = resolve({"port": "9901"}, {"PEERLOOM_LISTEN": "127.0.0.1:9747"}).listen
    assert {address.port for address in found.addresses} == {9901}
    assert {address.host for address in found.addresses} == {"0.0.0.0", "::"}
    assert found.may_move
    for wrong in ("0", "65536", "-1", "9747.5", "a"):
        with pytest.raises(UsageError, match=f"--port {wrong}: want a whole number, 1 to 65535"):
            resolve({"port": wrong}, {})


def test_a_node_may_listen_at_several_addresses_and_announce_hosts(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("listen = {addresses = ['0.0.0.0:1', '[::]:1'], announce = ['lab.example:2']}\n")
    listen = Config.load(file).listen
    assert [address.short for address in listen.addresses] == ["0.0.0.0:1", "[::]:1"]
    assert [str(address) for address in listen.announce] == ["/dns/lab.example/tcp/2"]
    flags = {"listen": ["10.0.0.1:0", "[::1]:0"], "announce": ["a.example:1", "[fd00::1]:2"]}
    listen = resolve(flags, {}).listen
    assert [address.short for address in listen.addresses] == ["10.0.0.1:0", "[::1]:0"]
    assert [read_listen(text).short for text in ("[fe80::1%eth0]:0", "/ip6zone/eth0/ip6/fe80::1/tcp/0")] == [
        "[fe80::1%eth0]:0"
    ] * 2
    with pytest.raises(UsageError, match="link-local addresses are announced by beacons on their link"):
        resolve({"announce": ["[fe80::1%eth0]:1"]}, {})
    with pytest.raises(UsageError, match="9 addresses to listen; at most 8"):
        resolve({"listen": [f"10.0.0.{number}:1" for number in range(9)]}, {})


def test_local_discovery_is_on_by_default(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("join = {lan = false}\n")
    assert resolve({}, {}).join.lan
    assert not Config.load(file).join.lan
    assert not resolve({"lan": False}, {"PEERLOOM_LAN": "true"}).join.lan


def test_equally_similar_words_are_ordered_alphabetically() -> None:
    assert nearest("--jion", ["--json", "--join"]) == "--join"
    assert nearest("--JSON", ["--json", "--join"]) == "--json"
    assert nearest("zebra", ["--json", "--join"]) is None
