"""Alerts: when each rule raises one, that it is reported once and cleared, and how webhooks and commands are
called.
"""

import json
import math
from pathlib import Path

import pytest
import trio

from node import config, events
from node.alerts.rules import SLOW_STEPS, AlertRules, Facts
from node.alerts.service import Alerts
from node.config import Config
from node.errors import UsageError
from node.settings_events import RunGoalSet
from tests.node.web.world import STARTED, Told, run_events

RUN = "ab" * 8


def facts(**changes: float) -> Facts:
    usual = {
        "monotonic": 100.0,
        "wall": STARTED + 100.0,
        "disk_free_bytes": 50 << 30,
        "disk_total_bytes": 100 << 30,
        "protocol_errors": 0,
    }
    return Facts(**(usual | changes))  # type: ignore[arg-type]  # all are numbers


def step(number: int, *, loss: float = 1.0, seconds: float = 1.0) -> events.StepCommitted:
    return events.StepCommitted(
        at=STARTED + number, run=RUN, step=number, loss=loss, samples=8, seconds=seconds, replicas=4
    )


def kinds(rules: AlertRules, **changes: float) -> set[str]:
    return {kind for kind, _ in rules.look(facts(**changes))}


def watching(*happened: events.Event) -> AlertRules:
    rules = AlertRules()
    for event in happened:
        rules.take(event)
    return rules


def test_a_healthy_node_raises_nothing() -> None:
    assert kinds(watching(*run_events(steps=100))) == set()


def test_an_alert_for_a_non_finite_loss_stays_raised() -> None:
    rules = watching(step(0), step(1, loss=math.nan))
    assert kinds(rules) == {"loss_not_finite"}
    rules.take(step(2))
    assert kinds(rules) == set()


def test_a_rising_loss_is_reported_but_noise_is_not() -> None:
    falling = [step(number, loss=2.0 * 0.98**number + 0.2 * (number % 3)) for number in range(100)]
    assert kinds(watching(*falling)) == set()
    rising = [step(100 + number, loss=3.0) for number in range(20)]
    assert kinds(watching(*falling, *rising)) == {"loss_rising"}


def test_slow_steps_are_reported_but_one_slow_step_is_not() -> None:
    usual = [step(number) for number in range(20)]
    assert kinds(watching(*usual, step(20, seconds=30.0), step(21))) == set()
    slow = [step(20 + number, seconds=4.0) for number in range(SLOW_STEPS)]
    rules = watching(*usual, *slow)
    assert kinds(rules) == {"steps_slow"}
    rules.take(step(40))
    assert kinds(rules) == set()


def test_a_degraded_run_is_reported_after_a_while() -> None:
    rules = watching(events.RunChanged(at=STARTED, run=RUN, state="degraded", reason="one replica is gone"))
    assert kinds(rules, wall=STARTED + 10.0) == set()
    assert kinds(rules, wall=STARTED + 40.0, monotonic=130.0) >= {"replicas_below_wanted"}
    rules.take(events.RunChanged(at=STARTED + 50, run=RUN, state="running", reason=""))
    assert "replicas_below_wanted" not in kinds(rules, wall=STARTED + 60.0)


def test_a_full_disk_wrong_clock_and_bad_peer_are_reported() -> None:
    rules = AlertRules()
    assert kinds(rules, disk_free_bytes=1 << 29) == {"disk_nearly_full"}
    assert kinds(rules, monotonic=102.0, wall=STARTED + 202.0) == {"clock_off"}
    assert kinds(rules, monotonic=104.0, wall=STARTED + 204.0, protocol_errors=1_000) == {
        "clock_off",
        "peer_misbehaves",
    }
    assert kinds(rules, monotonic=1_000.0, wall=STARTED + 1_100.0, protocol_errors=1_000) == set()


def test_the_number_of_watched_runs_is_bounded() -> None:
    rules = AlertRules()
    for number in range(500):
        rules.take(
            events.RunEnded(at=STARTED, run=f"{number:016x}", outcome="failed", detail="no provider is left")
        )
    assert len(rules.look(facts())) <= 64


def full_disk(folder: Path) -> tuple[int, int]:
    return 1 << 20, 1 << 40


async def serve_once(listener: trio.SocketListener, received: list[bytes]) -> None:
    async with await listener.accept() as client:
        data = b""
        while b"}" not in data:
            data += await client.receive_some(65_536)
        received.append(data)
        await client.send_all(b"HTTP/1.1 204 \r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


async def test_an_alert_is_sent_as_an_event_a_webhook_and_a_command(tmp_path: Path) -> None:
    out = tmp_path / "told"
    command = tmp_path / "tell.sh"
    lines = ["#!/bin/sh", f'echo "$PEERLOOM_ALERT_KIND $PEERLOOM_ALERT_IS_RAISED" >> {out}.half']
    command.write_text("\n".join([*lines, f"mv {out}.half {out}", ""]))
    command.chmod(0o700)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    wanted = config.AlertSettings(webhook=f"http://127.0.0.1:{port}/hook", command=(str(command),))
    node = Told(config=Config(name="here", alerts=wanted))
    received: list[bytes] = []
    with trio.fail_after(30):
        async with listener, trio.open_nursery() as nursery:
            nursery.start_soon(serve_once, listener, received)
            nursery.start_soon(Alerts(node, full_disk).run)
            while not (received and out.exists()):  # noqa: ASYNC110 - a file of another process tells
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    posted = json.loads(received[0].partition(b"\r\n\r\n")[2])
    assert (posted["kind"], posted["is_raised"], posted["node"]) == ("disk_nearly_full", True, "here")
    assert out.read_text() == "disk_nearly_full True\n"
    raised = [event for _, event in node.history.after(0) if isinstance(event, events.AlertRaised)]
    assert [event.alert for event in raised] == ["disk_nearly_full"]
    assert list(node.state.alerts) == [("disk_nearly_full", "")]


def test_an_alert_is_reported_once_and_cleared_once() -> None:
    free = [1 << 20, 1 << 20, 90 << 30, 90 << 30]
    node = Told()
    service = Alerts(node, lambda _: (free.pop(0), 100 << 30))

    class Clock:
        def monotonic(self) -> float:
            return 100.0

        def wall(self) -> float:
            return STARTED

    node.seams.clock = Clock()
    told = [[type(event).__name__ for event in service.look()] for _ in range(4)]
    assert told == [["AlertRaised"], [], ["AlertCleared"], []]


@pytest.mark.parametrize("text", ["ftp://x/", "javascript:1", "http://", "nothing"])
def test_a_webhook_must_be_an_http_url(text: str) -> None:
    with pytest.raises(UsageError):
        config.resolve({"alert_webhook": text}, {})


def test_a_run_below_its_goal_long_enough_raises_an_alert() -> None:
    goal = RunGoalSet(at=STARTED, run=RUN, samples_per_second=10.0, seconds=20)

    def now(rules: AlertRules, seconds: float) -> set[str]:
        return kinds(rules, wall=STARTED + seconds, monotonic=seconds)

    slow = watching(step(0), goal, *(step(number) for number in range(1, 31)))  # 8 samples per second
    assert now(slow, 15) == set(), "an alert was raised before the goal's time had passed"
    assert now(slow, 30) == {"run_below_goal"}
    fast = watching(step(0), goal, *(step(number) for number in range(1, 31)))
    for number in range(1, 31):
        fast.take(step(number))  # twice as many samples per step
    assert now(fast, 30) == set()
    assert now(fast, 60) == {"run_below_goal"}, "a run that made no step for a while raised no alert"
    assert now(watching(step(0), *(step(number) for number in range(1, 31))), 60) == set(), (
        "a run without a goal raised an alert"
    )


def test_a_paused_run_is_not_below_its_goal() -> None:
    goal = RunGoalSet(at=STARTED, run=RUN, samples_per_second=10.0, seconds=20)
    paused = events.RunChanged(at=STARTED + 31, run=RUN, state="paused", reason="its requester paused it")
    resumed = events.RunChanged(at=STARTED + 50, run=RUN, state="running", reason="")
    rules = watching(goal, *(step(number) for number in range(31)), paused)
    assert kinds(rules, wall=STARTED + 40, monotonic=40) == set()
    rules.take(resumed)
    rules.take(step(55))
    assert kinds(rules, wall=STARTED + 60, monotonic=60) == set(), (
        "the time before the pause counted toward the alert"
    )
    assert kinds(rules, wall=STARTED + 80, monotonic=80) == {"run_below_goal"}
