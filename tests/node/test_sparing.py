"""Machines on metered links or low batteries send less or serve no runs, and other nodes ask them for
less."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from node.averaging_events import AveragingEnded
from node.cli.peers import peers_lines
from node.cli.status import offer_lines
from node.config import resolve
from node.offering import SENDS_LESS, Offering
from node.placement.machine_state import MachineState
from node.placement.offers import SENDS_LESS_SHARE
from node.placement.permission import MachinePermission, Reading, refusal, why_less
from node.state_documents import peers_document, status_document
from partition.run.local.round_schedule import RoundSchedule
from partition.run.local_settings import LocalSettings
from tests.node.local.test_runs import ends, train
from tests.node.test_slot_reasons import USUAL, offer_of
from tests.source import ROOT
from tests.stack import simulate, swarm

LOW = Reading(600, on_mains=False, battery_percent=20.0)
WAIT_SECONDS = 40.0


def rules(**given: Any) -> Offering:
    return Offering(**given)


@pytest.mark.parametrize(
    ("offer", "reading", "refuses", "less"),
    [
        (rules(battery_min_percent=30), LOW, "on battery with less than 30 % left", True),
        (rules(battery_min_percent=30, battery_low="less"), LOW, "", True),
        (rules(battery_min_percent=20), LOW, "", False),
        (rules(battery_min_percent=30), Reading(600, on_mains=True, battery_percent=20.0), "", False),
        (rules(battery_min_percent=30), Reading(600, on_mains=False), "", False),
        (rules(metered="less"), Reading(600), "", True),
        (rules(metered="never"), Reading(600), "its link is metered", True),
        (rules(), LOW, "", False),
    ],
)
def test_an_owners_rules_decide_about_low_battery_and_metered_links(
    offer: Offering, reading: Reading, refuses: str, less: bool
) -> None:
    assert refusal(offer, reading)[1] == refuses
    assert bool(why_less(offer, reading)) == less
    found = MachinePermission().look(0.0, offer, reading)
    assert (found.may_serve, bool(found.sends_less)) == (not refuses, less)


def test_a_rule_about_a_missing_battery_is_reported() -> None:
    assert MachinePermission().look(0.0, rules(battery_min_percent=30), Reading(600)).unread == (
        "battery_min",
    )
    assert (
        MachinePermission().look(0.0, rules(battery_min_percent=30), Reading(600, on_mains=True)).unread == ()
    )


def supply(root: Path, name: str, **files: str) -> None:
    folder = root / "sys/class/power_supply" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n")


def test_the_charge_is_the_mean_of_the_machines_own_batteries(tmp_path: Path) -> None:
    state = MachineState(root=tmp_path)
    assert state.read().battery_percent is None
    supply(tmp_path, "hidpp_battery_0", type="Battery", scope="Device", status="Discharging", capacity="5")
    assert (state.read().battery_percent, state.read().on_mains) == (None, None), (
        "the battery of a mouse was counted as the machine's"
    )
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="20")
    supply(tmp_path, "BAT1", type="Battery", status="Unknown", capacity="60")
    assert (state.read().battery_percent, state.read().on_mains) == (40.0, False)
    supply(tmp_path, "AC", type="Mains", online="1")
    assert (state.read().battery_percent, state.read().on_mains) == (40.0, True)
    supply(tmp_path, "BAT0", capacity="soon")
    assert state.read().battery_percent == 60.0


def test_the_rules_are_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[offer]\nbattery_min = "30%"\nbattery_low = "less"\nmetered = "never"\n')
    found = resolve({"config": str(file)}, {}).offer
    assert found == rules(battery_min_percent=30, battery_low="less", metered="never")
    assert found.are_watched


def test_a_members_claim_about_its_link_can_only_lower_its_load() -> None:
    usual = offer_of(USUAL, accepts_runs=True)
    sparing = offer_of((*USUAL, SENDS_LESS), accepts_runs=True)
    assert sparing.flops_per_second == SENDS_LESS_SHARE * usual.flops_per_second
    assert sparing.has_slot
    assert offer_of((*USUAL, "metered")).lacks == "metered"


def test_a_machine_on_low_battery_is_asked_for_less() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            a, b = group.nodes["a"], group.nodes["b"]

            def seen() -> tuple[bool, float]:
                (offer,) = (each for each in a.runs.offers() if each.peer == b.peer)
                return offer.has_slot, offer.flops_per_second

            _, usual = seen()
            b.provider.read = lambda: LOW
            b.set("battery_low", "less")
            b.set("battery_min", "30%")
            await trio.sleep(5)
            assert seen() == (True, SENDS_LESS_SHARE * usual)
            assert ", sends less" in "\n".join(peers_lines(peers_document(a.state, trio.current_time())))
            status = status_document(b.state, trio.current_time(), {})["offer"]
            assert offer_lines(status) == ["  sends       less: on battery with less than 30 % left"]
            b.set("battery_low", "never")
            await trio.sleep(5)
            assert not seen()[0]

    simulate(scenario)


def test_rounds_are_less_frequent_if_a_member_sends_less() -> None:

    def due(*, sends_less: bool, needs_all: bool = False) -> list[int]:
        rounds = RoundSchedule(LocalSettings(local_steps=2), needs_all=needs_all)
        rounds.sends_less = lambda: sends_less
        found = []
        for step in range(1, 17):
            if rounds.is_due(step, is_idle=False):
                found.append(step)
                rounds.skip(0.0, step, 0)
        return found

    assert due(sends_less=True) == [8, 16]
    assert due(sends_less=False) == [*range(2, 17, 2)]
    assert due(sends_less=True, needs_all=True) == [*range(2, 17, 2)], (
        "rounds are skipped although a missed round would cost the transfer of a whole state"
    )


@pytest.mark.slow
def test_a_metered_member_averages_less_but_reaches_the_same_model() -> None:

    async def play() -> None:
        async with swarm("abc", stage_seconds=0.2, preset="lan") as group:
            b = group.nodes["b"]
            b.provider.read = lambda: Reading(600)
            b.set("metered", "less")
            await train(group, LocalSettings(local_steps=2), steps=48)
            found = await ends(group, "abc", 200.0)
            assert {end.outcome for end in found} == {"done"}
            assert len({end.weights for end in found}) == 1
            count = Counter(
                name for name in "abc" for event in group.events[name] if isinstance(event, AveragingEnded)
            )
            assert count["b"] <= 0.75 * min(count["a"], count["c"]), count

    simulate(play)


# Through the command line


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Path]]:
    """Yield the data folders of two real nodes. The node.toml of the second declares a metered link."""
    file = tmp_path / "node.toml"
    file.write_text('[offer]\nmetered = "less"\n')
    common = [sys.executable, "-m", "node", "--json", "--listen", "127.0.0.1:0", "--no-lan", "--web", "off"]
    common += ["--preset", "local"]
    folders = [tmp_path / "a", tmp_path / "b"]
    with ExitStack() as stack:
        joins: list[str] = []
        for folder in folders:
            command = [*common, "--data-dir", str(folder), *joins, "--config", str(file)]
            command = command if joins else command[:-2]
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            started = next(row for row in map(json.loads, process.stdout) if row["kind"] == "NodeStarted")
            joins = ["--join", started["addresses"][0]]
        yield folders


def said(folder: Path, *command: str) -> str:
    ran = [sys.executable, "-m", "node", *command, "--data-dir", str(folder)]
    return subprocess.run(ran, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_node_on_a_metered_link_announces_it(nodes: list[Path]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while "sends less" not in said(nodes[0], "peers"):
        assert time.monotonic() < until, said(nodes[0], "peers")
    assert "sends       less: its link is metered" in said(nodes[1], "status")
    assert "does not serve others now: its link is metered" in said(
        nodes[1], "config", "set", "metered", "never"
    )
