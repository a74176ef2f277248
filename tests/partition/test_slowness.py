"""Replicas slower than promised are marked with their rate after some steps, and unmarked when they
recover."""

from dataclasses import dataclass
from typing import Any

from crypto.identity import PeerId
from partition.steps.slowness import PROMISE_STEPS, SLOW_STEPS, Slowness, SlowReplicas

A, B, C = (PeerId(bytes([number]) * 32) for number in range(3))


@dataclass
class Stage:
    replicas: tuple[PeerId, ...]
    rates: tuple[int, ...]


@dataclass
class Plan:
    stages: tuple[Stage, ...]


def play(plan: Any, slow: SlowReplicas, paces: dict[PeerId, int], steps: int) -> list[Slowness]:
    return [change for _ in range(steps) for change in slow.stepped(plan, paces)]


def test_a_lone_replica_is_compared_with_its_first_steps() -> None:
    plan, slow = Plan((Stage((A,), (100,)), Stage((B,), (100,)))), SlowReplicas()
    assert play(plan, slow, {A: 100, B: 50}, PROMISE_STEPS) == []
    assert play(plan, slow, {A: 100, B: 190}, SLOW_STEPS - 1) == []
    assert play(plan, slow, {A: 100, B: 190}, 1) == [Slowness(1, B, 50 / 190)]
    assert play(plan, slow, {A: 100, B: 190}, 20) == []
    assert play(plan, slow, {A: 100, B: 60}, 3) == [Slowness(1, B, 1.0)]


def test_a_replica_slow_from_the_start_is_detected_by_its_peers() -> None:
    plan, slow = Plan((Stage((A, B, C), (100, 100, 50)),)), SlowReplicas()
    # C may take twice as long as A and B; it takes five times as long.
    assert play(plan, slow, {A: 100, B: 100, C: 500}, SLOW_STEPS) == [Slowness(0, C, 0.4)]
    assert play(plan, SlowReplicas(), {A: 100, B: 100, C: 220}, 50) == []


def test_brief_slowness_and_an_unknown_rate_are_ignored() -> None:
    plan, slow = Plan((Stage((A, B), (1, 1)),)), SlowReplicas()
    for _ in range(20):
        assert play(plan, slow, {A: 100, B: 100}, SLOW_STEPS) == []
        assert play(plan, slow, {A: 100, B: 900}, SLOW_STEPS - 1) == []
    assert play(plan, slow, {A: 0}, 20) == []
    slow.begin()
    assert play(plan, slow, {A: 900, B: 900}, 20) == []
