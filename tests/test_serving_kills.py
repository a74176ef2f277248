"""SIGKILL to one stage or node after another during answers, with replicas and without: clients see the same
tokens, with short pauses.

Real processes, some ten seconds per kill: PEERLOOM_SERVING_KILLS is the total number of kills, and
PEERLOOM_SERVING_SESSIONS the number of sessions of the last test, in four parts. PEERLOOM_SERVING_SEED
selects different victims, so that a long soak can be played piece by piece.
"""

import os
import random
import threading
import time
from pathlib import Path

import psutil
import pytest

from node.cli.client import NodeRefused, ask
from tests.serving_swarm import SECONDS_MAX, Ground, Question, Streams, until

KILLS = int(os.environ.get("PEERLOOM_SERVING_KILLS", "0"))
SESSIONS = int(os.environ.get("PEERLOOM_SERVING_SESSIONS", "1000"))
SEED = int(os.environ.get("PEERLOOM_SERVING_SEED", "0"))
PARTS = 4
pytestmark = pytest.mark.skipif(not KILLS, reason="some ten seconds a kill: PEERLOOM_SERVING_KILLS=100")
TOKENS = 80
STREAMS = 8
REPLICA_SECONDS_MAX, LOAD_SECONDS_MAX = 2.0, 10.0
"""Maximum pause of an answer at the 95th percentile: with a replica, and if a machine must first load the
stage."""
KILL_SECONDS = 20.0
GROWTH_BYTES_MAX = 8 << 20
"""How much the door (the node that asks) may grow over the 250 sessions of a part. It grew by 0 to 2 MB in
parts of 270 to 290 sessions with five to fourteen kills, because its records of answers and of former nodes
are bounded. The margin covers heap that is not returned to the system; a leak of 32 KB a session would show.
"""


def percentile(values: list[float], part: float) -> float:
    ranked = sorted(values) or [0.0]  # no killed process served an answer
    return ranked[min(len(ranked) - 1, int(part * len(ranked)))]


def report(what: str, pauses: list[float], streams: Streams) -> None:
    print(  # noqa: T201 - what the soak is run for
        f"\n{what}: pause p50 {percentile(pauses, 0.5):.2f} s, p95 {percentile(pauses, 0.95):.2f} s, longest "
        f"{max(pauses, default=0.0):.2f} s; {streams.answers} answers, {streams.moves} moves"
    )


def slow(what: str, pauses: list[float]) -> None:
    """Print the kill before each long pause of an answer."""
    if max(pauses, default=0.0) > REPLICA_SECONDS_MAX:
        shown = ", ".join(f"{pause:.2f}" for pause in sorted(pauses, reverse=True))
        print(f"\n{time.strftime('%T')} after {what}: {shown} s")  # noqa: T201


def strike(ground: Ground, rng: random.Random, service: str) -> tuple[str, str]:
    """Kill a holder of a stage; on the door's node kill only the stage. Return the name of the node to
    restart ("" if it lives), and a description of the kill.
    """
    holders = ground.holders(service)
    victim = rng.choice(sorted({name for names in holders for name in names}))
    kill = rng.choice((ground.kill_stage, ground.kill_node, ground.kill_node_alone))
    if victim == ground.names[0]:
        kill = ground.kill_stage
    kill(victim)
    # Wait until the others have noticed, so that only one process is missing at the next kill.
    until(lambda: all(victim not in names for names in ground.holders(service)), what="it lives")
    return victim if victim in ground.dead else "", f"{kill.__name__} {victim} of {holders}"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_answers_are_the_same_after_any_kill(tmp_path: Path, threads: int, replicas: int) -> None:
    rng = random.Random(f"{SEED} {threads} {replicas}")
    names = "abcdef" if replicas == 2 else "abcd"
    ground = Ground(tmp_path, dict.fromkeys(names, (1, threads)))
    pauses: list[float] = []
    try:
        ground.start()
        ground.serve("words", "a", replicas=replicas)
        until(lambda: ground.is_whole("words", replicas))
        streams = Streams(ground.door, ("words",), STREAMS, TOKENS)
        streams.begin()
        for _ in range(max(1, KILLS // 4)):
            moves, since = streams.moves, time.monotonic()
            gone, what = strike(ground, rng, "words")
            streams.flow()
            until(lambda: ground.is_whole("words", replicas))
            streams.flow()
            slow(what, streams.pauses(since))
            pauses += [pause for pause in streams.pauses(since) if pause > 0.5 or streams.moves > moves]
            if gone:
                ground.restart(gone)
                ground.meet()
        streams.stop()
        report(f"{threads} threads, {replicas} replicas", pauses, streams)
        bound = REPLICA_SECONDS_MAX if replicas > 1 else LOAD_SECONDS_MAX
        assert percentile(pauses, 0.95) <= bound
    finally:
        ground.close()


def test_a_service_refuses_until_a_node_holds_its_stage(tmp_path: Path) -> None:
    ground = Ground(tmp_path, dict.fromkeys("abc", (1, 1)))
    try:
        ground.start(1)
        ground.serve("other", "a", stages=1)  # so that the node has no slot for the next one
        for name in "bc":
            ground.restart(name)
        ground.meet()
        ground.serve("words", "a", replicas=1)
        expected: list[int] = []
        Question("words", 1, 0.0, TOKENS).ask(ground.door, expected.append)
        for name in "bc":
            ground.kill_node(name)
        with pytest.raises(NodeRefused) as refusal:
            Question("words", 1, 0.0, TOKENS).ask(ground.door, lambda token: None)
        assert "nobody answers for stage" in str(refusal.value)
        began = time.monotonic()
        ground.restart("b")
        started = time.monotonic()
        until(lambda: ground.holders("words") == [["b"], ["b"]], what="it takes not all stages")
        took, starting = time.monotonic() - started, started - began
        print(f"\nservice again {took:.1f} s after a node runs, which took {starting:.1f} s")  # noqa: T201
        said: list[int] = []
        Question("words", 1, 0.0, TOKENS).ask(ground.door, said.append)
        assert said == expected
    finally:
        ground.close()


@pytest.mark.parametrize("part", range(PARTS))
def test_a_thousand_sessions_leave_nothing_behind(tmp_path: Path, part: int) -> None:
    rng = random.Random(f"{SEED} {part}")
    ground = Ground(tmp_path, dict.fromkeys("abcdef", (1, 1)))
    try:
        ground.start()
        ground.serve("words", "a", replicas=2)
        until(lambda: ground.is_whole("words", 2))
        streams = Streams(ground.door, ("words",), 16, TOKENS)
        streams.begin()
        door = psutil.Process(ground.swarm.nodes["a"].process.pid)
        threading.Event().wait(KILL_SECONDS)
        before, files = door.memory_info().rss, door.num_fds()
        pauses: list[float] = []
        kills = 0
        while streams.answers < SESSIONS // PARTS:
            since = time.monotonic()
            gone, what = strike(ground, rng, "words")
            kills += 1
            if gone:
                ground.restart(gone)
            threading.Event().wait(max(0.0, since + KILL_SECONDS - time.monotonic()))
            assert not streams.failures, streams.failures[0]
            slow(what, streams.pauses(since))
            pauses += streams.pauses(since)
        streams.stop()
        grown = door.memory_info().rss - before
        report(f"{streams.answers} sessions, {kills} kills", pauses, streams)
        until(lambda: not any(row["sessions"] for rows in ground.stages("words") for row in rows))
        for name in ground.names:
            own = psutil.Process(ground.swarm.nodes[name].process.pid)
            print(name, own.num_fds(), own.num_threads(), own.memory_info().rss >> 20)  # noqa: T201
        opened = door.num_fds() - files
        print(f"the door has grown by {grown / 1e6:.0f} MB and {opened} descriptors")  # noqa: T201
        assert grown <= GROWTH_BYTES_MAX
        assert opened <= 16
        assert ask(ground.door, "status", seconds=SECONDS_MAX)
    finally:
        ground.close()
