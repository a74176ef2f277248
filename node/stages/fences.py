"""Tests which fences this machine supports, in a separate process (`node.stages.trial`).

A fence cannot be removed, so the test sets up fences around a process that ends afterwards. The node runs the
test at its start, before it offers anything, and so does `doctor`. The test fences no stage: each stage's
process sets up its own fences, and refuses to run if one fails (`node.stages.sandbox`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from node.config import Resources
from node.events import FencesTried
from node.services.capacity import find_device
from node.stages import sandbox
from node.stages.scratch import Scratch, remove_forgotten

TRIAL_SECONDS_MAX = 20.0
"""Time limit of the test. It takes 0.1 s; a swapping machine gets more time, but the node's start must not
wait forever."""
_SOURCE_ROOT = str(Path(__file__).parents[2])
REMEDY = (
    "to take stages of others without the fences: allow_unfenced = true under "
    "[resources] in node.toml, or PEERLOOM_ALLOW_UNFENCED=true"
)


def try_fences(device: str, python: str = sys.executable) -> sandbox.Fenced:
    """Return the fences that a process of `python` that computes on `device` gets here. Call it in a thread;
    it raises nothing.

    If the test itself fails, the result states that no fence is known to hold. It also removes scratch
    folders of killed nodes.
    """
    remove_forgotten()
    try:
        scratch = Scratch()
    except OSError as error:
        return _failed(f"no scratch folder: {error.strerror or error}")
    try:
        ended = subprocess.run(  # noqa: S603 - our own program, a device name checked by the config
            [python, "-P", "-m", "node.stages.trial", device],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=scratch.path,
            env=sandbox.environment(os.environ, scratch=scratch.path, path=_SOURCE_ROOT, threads=1),
            timeout=TRIAL_SECONDS_MAX,
            check=True,
            # Ctrl-C at the terminal is meant for the node. A test interrupted by it would prove nothing.
            process_group=0,
        )
        said = json.loads(ended.stdout)
        return sandbox.Fenced(tuple(said["fences"]), tuple(said["unfenced"]))
    except (OSError, subprocess.TimeoutExpired) as error:
        return _failed(str(error))
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return _failed(f"it ended with status {error.returncode}: {last}")
    except (ValueError, KeyError):
        return _failed("its output could not be read")
    finally:
        scratch.remove()


def try_here(resources: Resources, at: float) -> FencesTried:
    """Return the result of the test as an event, for the device of a node with these resources."""
    tried = try_fences(find_device(resources.device))
    return FencesTried(
        at=at, fences=tried.fences, unfenced=tried.unfenced, is_allowed=resources.allow_unfenced
    )


def _failed(reason: str) -> sandbox.Fenced:
    return sandbox.Fenced((), (f"network, programs, files, memory: the trial failed: {reason[:200]}",))
