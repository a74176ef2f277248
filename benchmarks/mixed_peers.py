"""How much an idle peer, a slow one, and one that comes and goes slow down the steps of five others.

Eight nodes run on loopback, in threads of one process; a step consists of a sleep and a small model. Five
train. Then three more join: one makes a single step, like a notebook whose cell has ended; one is four times
slower; one leaves after some seconds and comes back. The share of time in which `step` of the five waited for
unready peers (`waited_seconds`) is compared before the three joined and with them. The share of time in which
`step` worked or waited for the run at all (`blocked_seconds`) is also shown. Nodes of one process share its
cores, so an exchange among seven takes longer than one among five.
"""

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _figures import Goal, arguments, leave, report
from silence import BATCH, JOINED_SECONDS, LOCAL_STEPS, SLOWNESS, STEP_SECONDS, Trainer, settings

from node.library.sync import SyncNode, sync

PUNCTUAL = 5
BEFORE_SECONDS, SECONDS, SECONDS_QUICK = 10.0, 60.0, 40.0
AWAY_SHARE = 4
"""The peer that comes and goes is alternately present and absent for a quarter of the time."""
WAITS_GOAL = 5.0
OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {"target_batch_size": 2 * PUNCTUAL * BATCH, "batch_size": BATCH},
    "local": {"local_steps": LOCAL_STEPS, "batch_size": BATCH},
}


def shares(members: list[Trainer], seconds: float, play: Any = time.sleep) -> tuple[list[float], list[float]]:
    """Return, for each trainer, the percentage of time in which `step` waits for peers, and for the run at
    all."""
    before = [each.optimizer.stats for each in members]
    begun = time.monotonic()
    play(seconds)
    percent = 100 / (time.monotonic() - begun)
    both = list(zip(before, [each.optimizer.stats for each in members], strict=True))
    return (
        [percent * (b.waited_seconds - a.waited_seconds) for a, b in both],
        [percent * (b.blocked_seconds - a.blocked_seconds) for a, b in both],
    )


def play(nodes: list[SyncNode], mode: str, seconds: float) -> dict[str, Any]:
    options = OPTIONS[mode]
    with ExitStack() as stack:
        members = [Trainer(me, mode, STEP_SECONDS, options) for me in nodes[:PUNCTUAL]]
        for each in members:
            stack.callback(each.close)
        end = time.monotonic() + JOINED_SECONDS
        while time.monotonic() < end and min(each.optimizer.stats.rounds for each in members) < 3:
            time.sleep(0.05)
        without, blocked_without = shares(members, BEFORE_SECONDS)
        steps = [each.optimizer.global_step for each in members]

        def beside(seconds: float) -> None:
            idle = Trainer(nodes[PUNCTUAL], mode, STEP_SECONDS, options)
            slow = Trainer(nodes[PUNCTUAL + 1], mode, SLOWNESS * STEP_SECONDS, options)
            stack.callback(idle.close)
            stack.callback(slow.close)
            idle.end()
            for _ in range(AWAY_SHARE // 2):
                guest = Trainer(nodes[PUNCTUAL + 2], mode, STEP_SECONDS, options)
                time.sleep(seconds / AWAY_SHARE)
                guest.close()
                time.sleep(seconds / AWAY_SHARE)

        during, blocked = shares(members, seconds, beside)
        made = [each.optimizer.global_step - n for each, n in zip(members, steps, strict=True)]
        for each in members:
            each.end()
    more = [after - before for before, after in zip(without, during, strict=True)]
    return {
        "mode": mode,
        "waited_percent_without": round(statistics.median(without), 1),
        "with": round(statistics.median(during), 1),
        "more_percent_of_the_worst": round(max(more), 1),
        "blocked_percent_without": round(statistics.median(blocked_without), 1),
        "blocked_with": round(statistics.median(blocked), 1),
        "steps": min(made),
    }


def main() -> int:
    flags = arguments(__doc__ or "")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        nodes: list[SyncNode] = []
        for number in range(PUNCTUAL + 3):
            seed = nodes[0].addresses[0] if nodes else ""
            nodes.append(stack.enter_context(sync(settings(folder, f"n{number}", seed))))
        for each in nodes:
            each.wait_for_members(len(nodes) - 1)
        modes = ["batch"] if flags.quick else list(OPTIONS)
        rows = [play(nodes, mode, SECONDS_QUICK if flags.quick else SECONDS) for mode in modes]
    goals = [
        Goal(
            f"additional waiting with the three, percent of a member's time, {row['mode']}",
            row[key],
            "<=",
            WAITS_GOAL,
        )
        for row in rows
        for key in ("more_percent_of_the_worst",)
    ]
    return report("mixed_peers", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
