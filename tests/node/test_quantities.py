"""Durations, amounts and rates have one grammar: each flag and key for a quantity accepts every form of
it."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from node.config import RULES, resolve
from node.errors import NoNode, UsageError
from node.main import app, run
from node.offering import read_bandwidth
from node.planning.peers import Peers, read_peers, what_if
from node.quantities import AMOUNT_MAX, read_bytes, read_duration, read_flops, read_memory, read_rate
from node.settings import Relaying
from partition.plan.rates import assumed

DURATIONS: dict[str, float] = {
    "500ms": 0.5, "30s": 30.0, "30": 30.0, "2.5 s": 2.5, "2m": 120.0,
    "2min": 120.0, "1h": 3600.0, "2d": 172_800.0,
}  # fmt: skip
SIZES: dict[str, float] = {
    "8GB": 8 * 10**9, "8GiB": 8 << 30, "1.5 GiB": 3 << 29, "800MiB": 800 << 20, "64kB": 64_000,
    "8gb": 8 * 10**9, "1TB": 10**12, "4096B": 4_096,
}  # fmt: skip
RATES: dict[str, float] = {
    "10Mbit/s": 1_250_000, "10Mbit": 1_250_000, "10Mbps": 1_250_000, "1.5MB/s": 1_500_000, "2MiB/s": 2 << 20,
    "1Gbit": 125_000_000,
}  # fmt: skip
SPEEDS: dict[str, float] = {"50GFLOPS": 50 * 10**9, "50 GFLOP/s": 50 * 10**9, "1.5tflops": 15 * 10**11}


@pytest.mark.parametrize(
    ("read", "forms"),
    [(read_duration, DURATIONS), (read_bytes, SIZES), (read_rate, RATES), (read_flops, SPEEDS)],
)
def test_each_form_of_a_quantity_is_read(read: Callable[[str], float], forms: dict[str, float]) -> None:
    assert {text: read(text) for text in forms} == forms


@pytest.mark.parametrize(
    "text", ["", "fast", "-1s", "1e3s", "1 week", "s", "8", "8 G", "0GB", "1" * 400 + "PB"]
)
@pytest.mark.parametrize("read", [read_bytes, read_flops, read_rate])
def test_malformed_amounts_are_refused(read: Callable[[str], int], text: str) -> None:
    with pytest.raises(ValueError, match=r"^want "):
        read(text)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1e3s", "1 week", "s", "8GB", "1" * 400])
def test_malformed_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^want a time such as "):
        read_duration(text)


@given(st.integers(1, 2**53))
def test_amounts_can_be_parsed_as_they_are_printed(amount: int) -> None:
    assert read_bytes(f"{amount}B") == read_flops(f"{amount} flops") == read_rate(f"{amount}B/s") == amount


@given(st.text("0159.kKmMgGiIbBhsd/ %-", max_size=8))
def test_any_text_is_parsed_within_limits_or_refused(text: str) -> None:
    for read in (read_duration, read_bytes, read_flops, read_rate):
        with suppress(ValueError):
            assert 0 <= read(text) <= AMOUNT_MAX


# Flags whose example in the help is a quantity

ABSENT = "/nowhere/RUN.toml"
FLAGS: dict[str, list[str]] = {
    "peerloom dht put --ttl": ["dht", "put", "key", "value", "--ttl"],
    "peerloom dht find --memory": ["dht", "find", "--memory"],
    "peerloom dht find --speed": ["dht", "find", "--speed"],
    "peerloom events --since": ["events", "--since"],
    "peerloom runs invite --valid": ["runs", "invite", "name", "peer", "--valid"],
    "peerloom top --every": ["top", "--every"],
}
"""For each flag, the command up to the flag's value. No node runs, and the command reports that only after it
has parsed the value."""
STARTING = {"peerloom --memory", "peerloom --require-join", "peerloom train --wait"}
"""Flags of commands that start a node or a run; the tests below cover them."""


def quantities(command: Any, name: str = "peerloom") -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each flag whose example is a quantity, with the forms of that quantity."""
    for each in command.params:
        for read, forms in (
            (read_duration, DURATIONS),
            (read_bytes, SIZES),
            (read_rate, RATES),
            (read_flops, SPEEDS),
        ):
            try:
                read(each.metavar or "")
            except ValueError:
                continue
            yield f"{name} {each.opts[0]}", forms
            break
    for word, each in getattr(command, "commands", {}).items():
        yield from quantities(each, f"{name} {word}")


def test_each_flag_with_a_quantity_is_in_the_table() -> None:
    assert {flag for flag, _forms in quantities(typer.main.get_command(app))} == {*FLAGS, *STARTING}


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_accepts_every_form(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEERLOOM_DATA_DIR", str(tmp_path))
    forms = dict(quantities(typer.main.get_command(app)))[flag]
    within = [text for text in forms if flag != "peerloom top --every" or 0.2 <= forms[text] <= 60]
    assert {text: run([*FLAGS[flag], text]) for text in within} == dict.fromkeys(within, NoNode.exit_code)
    capsys.readouterr()
    assert run([*FLAGS[flag], "nonsense"]) == UsageError.exit_code
    assert f"{flag.split()[-1]} nonsense: want " in capsys.readouterr().err


@pytest.mark.parametrize("form", DURATIONS)
def test_start_and_train_accept_every_form_of_a_duration(
    form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEERLOOM_DATA_DIR", str(tmp_path))
    for words in (["train", ABSENT, "--wait", form], ["--require-join", form, "--join", "a:b:c"]):
        assert run(words) == UsageError.exit_code
        assert "want a time" not in capsys.readouterr().err


# Keys


@pytest.mark.parametrize(
    "rule",
    [rule for rule in RULES if rule.read in (read_memory, read_duration, read_bandwidth)],
    ids=lambda rule: rule.name,
)
def test_each_key_and_variable_accepts_every_form(rule: Any, tmp_path: Path) -> None:
    forms = {read_memory: SIZES, read_duration: DURATIONS, read_bandwidth: RATES}[rule.read]
    file = tmp_path / "node.toml"
    for text in forms:
        file.write_text(f'[{rule.key[0]}]\n{rule.key[1]} = "{text}"\n')
        found = resolve({"config": str(file)}, {})
        assert found == resolve({}, {rule.environment: text}) == resolve({rule.name: text}, {})
        is_default = rule.name == "relay_upload" and RATES[text] == Relaying().upload_bytes_per_second
        assert (found == resolve({}, {})) == is_default


def test_a_file_of_peers_and_its_changes_accept_every_form(tmp_path: Path) -> None:
    def read(memory: str, rate: str, link: str, latency: str) -> Peers:
        file = tmp_path / "peers.toml"
        row = f'name = "a"\nmemory = "{memory}"\nrate = "{rate}"\nlink = "{link}"\nlatency = "{latency}"\n'
        file.write_text(f"[[peers]]\n{row}")
        return read_peers(str(file))

    usual = read("8GB", "50GFLOPS", "1Gbit", "1ms")
    for form, value in SIZES.items():
        assert read(form, "50GFLOPS", "1Gbit", "1ms").peers[0].memory_bytes == value
    for form, value in SPEEDS.items():
        assert read("8GB", form, "1Gbit", "1ms").peers[0].calibration == assumed(int(value))
        assert what_if(usual, f"add=8GiB@{form}").peers[1].calibration == assumed(int(value))
    for form, value in RATES.items():
        assert read("8GB", "50GFLOPS", form, "1ms").peers[0].link.bytes_per_second == value
        assert what_if(usual, f"add=8GB@1GFLOPS@{form}").peers[1].link.bytes_per_second == value
    for form, seconds in DURATIONS.items():
        assert read("8GB", "50GFLOPS", "1Gbit", form).peers[0].link.nanoseconds == seconds * 1e9
