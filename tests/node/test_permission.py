"""Whether a machine serves others now: its owner's rules, its sensors, and how its slots are given back."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from node.config import resolve
from node.errors import UsageError
from node.events import OfferChanged, StepCommitted
from node.offering import Hours, Offering, read_hours
from node.placement.machine_state import MachineState
from node.placement.permission import CALM_SECONDS, MachinePermission, Reading, refusal
from tests.stack import Swarm, assert_equal, manifest, prepare, reference, simulate, swarm, weights

CALM = Reading(minute=600, idle_seconds=3_600.0, load_percent=1.0, on_mains=True)
ALL = Offering(hours=Hours(((540, 1_020),)), idle_seconds=300.0, load_percent=30, mains_only=True)

readings = st.builds(
    Reading,
    minute=st.integers(0, 1_439),
    idle_seconds=st.none() | st.floats(0, 1e5),
    load_percent=st.none() | st.floats(0, 100),
    on_mains=st.none() | st.booleans(),
)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"minute": 539}, "serves at 09:00-17:00 only, again at 09:00"),
        ({"minute": 1_020}, "serves at 09:00-17:00 only, again at 09:00"),
        ({"idle_seconds": 299.0}, "its owner uses it"),
        ({"load_percent": 30.5}, "other programs take more than 30 % of it"),
        ({"on_mains": False}, "on battery"),
    ],
)
def test_each_rule_refuses_with_its_reason(changed: dict[str, Any], reason: str) -> None:
    assert refusal(ALL, replace(CALM, **changed))[1] == reason


@given(reading=readings)
def test_a_machine_without_rules_serves_whatever_its_sensors_report(reading: Reading) -> None:
    assert refusal(Offering(), reading) == ("", "")


@given(st.lists(st.tuples(st.floats(0.1, 50), readings), min_size=1, max_size=40))
def test_a_machine_serves_only_after_all_rules_held_for_a_while(course: list[tuple[float, Reading]]) -> None:
    permit, now, fine_since, was_refused = MachinePermission(), 0.0, None, False
    for seconds, reading in course:
        now += seconds
        found = permit.look(now, ALL, reading)
        if refusal(ALL, reading)[1]:
            fine_since, was_refused = None, True
            assert not found.may_serve
            assert found.reason
        else:
            fine_since = now if fine_since is None else fine_since
            assert found.may_serve == (not was_refused or now - fine_since >= CALM_SECONDS)
            was_refused = was_refused and not found.may_serve


def test_rules_that_cannot_be_measured_are_reported_and_block_nothing() -> None:
    found = MachinePermission().look(0.0, ALL, Reading(minute=600))
    assert found.may_serve
    assert found.unread == ("idle", "load", "mains_only")


def test_hours_may_span_midnight() -> None:
    hours = read_hours("22:00-7, 12-13:30")
    assert [hours.holds(minute) for minute in (0, 419, 420, 719, 720, 810, 1_319, 1_320)] == [
        True, True, False, False, True, False, False, True,
    ]  # fmt: skip
    assert str(hours) == "22:00-07:00,12:00-13:30"
    assert [hours.next_begin(minute) for minute in (420, 810, 1_319)] == [720, 1_320, 1_320]
    for wrong in ("25-26", "9", "9-9", "09:60-10:00", "x"):
        with pytest.raises(ValueError, match="times of the day"):
            read_hours(wrong)


def test_the_rules_are_read_from_flags_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[offer]\nslots = 3\nhours = "22-6"\nidle = "10m"\nmains_only = true\n')
    found = resolve({"config": str(file)}, {"PEERLOOM_LOAD": "25%"}).offer
    assert found == Offering(3, Hours(((1_320, 360),)), 600.0, 25, mains_only=True)
    file.write_text('[offer]\nhours = "now and then"\n')
    with pytest.raises(UsageError, match=r"node.toml:2: hours now and then: want times of the day"):
        resolve({"config": str(file)}, {})


def test_power_and_input_sensors_are_read_if_available(tmp_path: Path) -> None:
    wall = 1_000_000.0
    state = MachineState(root=tmp_path, wall=lambda: wall)
    assert (state.read().on_mains, state.read().idle_seconds) == (None, None), (
        "an absent sensor has a reading"
    )
    terminal = tmp_path / "dev/pts/0"
    terminal.parent.mkdir(parents=True)
    terminal.touch()
    os.utime(terminal, (wall - 90, wall))
    battery, adapter = tmp_path / "sys/class/power_supply/BAT0", tmp_path / "sys/class/power_supply/AC"
    for folder, kind in ((battery, "Battery"), (adapter, "Mains")):
        folder.mkdir(parents=True)
        (folder / "type").write_text(kind + "\n")
    (battery / "status").write_text("Discharging\n")
    (adapter / "online").write_text("0\n")
    assert (state.read().on_mains, state.read().idle_seconds) == (False, 90.0)
    (adapter / "online").write_text("1\n")
    assert state.read().on_mains is True
    load = state.read().load_percent
    assert load is None or 0 <= load <= 100


@pytest.mark.parametrize("names", ["abcd", "ab"], ids=["another takes it", "nobody can"])
def test_a_returning_owner_gets_the_slot_without_loss_of_work(names: str) -> None:
    async def scenario() -> None:
        async with swarm(names, offer=Offering(idle_seconds=60)) as group:
            for name in names[0]:
                group.nodes[name].limit(accept_runs="never")
            await trio.sleep(5)
            a = group.nodes["a"]
            run = prepare(a, manifest(stages=1, replicas=1, steps=30, microbatches=2, save_every=5))
            idle = 3_600.0
            with a.watch() as events:
                await a.runs.submit(run)
                async for event in events:
                    if isinstance(event, StepCommitted) and event.step == 6:
                        break
            plan = a.state.runs[run.text].plan
            assert plan is not None
            host = group.nodes[group.name_of(plan.stages[0][0])]
            host.provider.read = lambda: Reading(600, idle_seconds=idle)
            idle, began = 1.0, trio.current_time()
            while host.runs.slots.free == 0:
                await trio.sleep(0.1)
                assert trio.current_time() - began < 10
            said = [event for event in group.events[host.config.name] if isinstance(event, OfferChanged)]
            assert [(event.may_serve, event.reason) for event in said] == [(False, "its owner uses it")]
            if names == "ab":
                await trio.sleep(20)
                assert a.state.runs[run.text].status == "paused", (
                    "the run is not paused although no provider is left for its stage"
                )
                idle = 3_600.0
            await until_over(group)
            assert a.state.runs[run.text].status == "done"
            assert_equal(weights(group, "a", run), reference(run), "float64")

    simulate(scenario)


async def until_over(group: Swarm) -> None:
    with trio.fail_after(300):
        while any(node.runs.members for node in group.nodes.values()):  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.5)


def test_rules_are_changed_while_the_node_runs() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            a, b = group.nodes["a"], group.nodes["b"]
            b.provider.read = lambda: Reading(600, on_mains=False)
            b.set("mains_only", "true")
            assert b.state.offer is not None
            assert (b.state.offer.may_serve, b.state.offer.reason) == (False, "on battery")
            await trio.sleep(5)
            assert not any(offer.has_slot for offer in a.runs.offers() if offer.peer == b.peer)
            b.set("mains_only", "false")
            assert b.provider.takes_stages_of_others
            b.set("accept_runs", "listed")
            run = prepare(a, manifest())
            assert b.provider.refusal(run, b.peer) == "takes stages of listed peers only"
            b.set("peers", a.id)
            assert b.provider.refusal(run, b.peer) is None
            b.set("accept_runs", "invited")
            assert b.provider.refusal(run, b.peer) == "takes stages of invited runs only"
            b.set("runs", run.text[:8])
            assert b.provider.refusal(run, b.peer) is None
            for name, value in (("slot", "2"), ("hours", "soon"), ("peers", "x")):
                with pytest.raises(UsageError):
                    b.set(name, value)

    simulate(scenario)
