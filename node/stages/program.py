"""The node's end of a stage's process, which loads torch and waits for its settings.

Loading takes a second on an idle machine and twenty on a busy one. So a node keeps a loaded process
(`Spare`), and a process whose stage has ended continues with the next stage of the same run (`renew`). The
settings arrive with the descriptors of the stage's memory; until then the process has read nothing but its
own modules.
"""

import contextlib
import fcntl
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import psutil

from node.forks import keep_from_children
from node.stages import sandbox
from node.stages.scratch import Scratch
from node.storage.budget import ScratchBudget

SETTINGS = struct.Struct("<QQ")
"""The memory allowed in addition to the initial memory, and whether the process may run without missing
fences."""

_SOURCE_ROOT = str(Path(__file__).parents[2])


class StageProgram:
    """A started process, and the node's end of its link. Its scratch folder counts in `budget`."""

    command: ClassVar[Sequence[str]] = ("-P", "-m", "node.stages.process")
    """The interpreter's arguments. -P keeps a file in the current folder from replacing one of the stage's
    modules."""

    def __init__(self, threads: int, device: str, budget: ScratchBudget | None = None) -> None:
        self.threads = threads
        self.device = device
        self._own_bytes = 0
        self.scratch = Scratch(budget)
        self.stderr = shared_file("stderr", 0)
        self.link, theirs = socket.socketpair()
        keep_from_children(self.link)
        with theirs:
            try:
                self.process = self._start(theirs.fileno())
            except BaseException:
                self.link.close()
                os.close(self.stderr)
                self.scratch.remove()
                raise

    def _start(self, link: int) -> "subprocess.Popen[bytes]":
        # Not trio's open_process, which forks from a pool thread: Linux kills a child that asked to die with
        # its parent as soon as the *thread* that forked it ends.
        scratch = self.scratch.path
        path = os.pathsep.join(filter(None, (_SOURCE_ROOT, os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(  # noqa: S603 - our own program and arguments
            [sys.executable, *self.command, *map(str, (link, os.getpid(), self.threads, self.device))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.stderr,
            pass_fds=(link,),
            cwd=scratch,
            env=sandbox.environment(os.environ, scratch=scratch, path=path, threads=self.threads),
        )

    def begin(self, memory_bytes: int, descriptors: Sequence[int], *, allow_unfenced: bool) -> None:
        """Send the process its memory limit, and the descriptors of the memory for tensors and arenas."""
        self._own_bytes = memory_bytes
        settings = SETTINGS.pack(memory_bytes, allow_unfenced)
        with contextlib.suppress(OSError):  # the process has ended, which the first missing answer will show
            socket.send_fds(self.link, [settings], list(descriptors))
        self.link.setblocking(False)

    def renew(self, memory_bytes: int) -> bool:
        """Allow `memory_bytes` for the process's next stage, in addition to its memory before its first
        stage. Return False if the kernel's limit cannot be changed."""
        if sys.platform != "linux" or self.device != "cpu":
            return True  # only the node's watch limits its memory
        try:
            limit, hard = resource.prlimit(self.process.pid, resource.RLIMIT_DATA)
            limit += memory_bytes - self._own_bytes
            resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (limit, hard))
        except (OSError, ValueError):  # a process that could not be fenced in keeps its limit
            return False
        return True

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def discard(self) -> None:
        """End a process that has not been given a stage."""
        self.process.kill()
        self.process.wait()
        self.link.close()
        os.close(self.stderr)
        self.scratch.remove()


class Spare:
    """At most one loaded process that waits for a stage."""

    def __init__(self, budget: ScratchBudget | None = None) -> None:
        self._budget = budget
        self._program: StageProgram | None = None

    @property
    def memory_bytes(self) -> int:
        """The process's own memory, without shared memory if the system reports it."""
        if self._program is None:
            return 0
        try:
            memory = psutil.Process(self._program.process.pid).memory_info()
        except psutil.Error:
            return 0
        return int(memory.rss) - int(getattr(memory, "shared", 0))

    def keep(self, threads: int, device: str) -> None:
        """Keep a process with these settings ready, starting one if necessary. Raises OSError if none can be
        started."""
        kept = self._program
        if kept is not None and kept.is_alive and (kept.threads, kept.device) == (threads, device):
            return
        self.drop()
        self._program = StageProgram(threads, device, self._budget)

    def take(self, threads: int, device: str) -> StageProgram | None:
        """Hand over the process to a stage with these settings; return None if there is no such process."""
        kept = self._program
        if kept is None or not kept.is_alive or (kept.threads, kept.device) != (threads, device):
            return None
        self._program = None
        return kept

    def drop(self) -> None:
        """End the waiting process, if there is one."""
        kept, self._program = self._program, None
        if kept is not None:
            kept.discard()


def shared_file(name: str, size: int) -> int:
    """Return a descriptor of an unnamed file with `size` zero bytes."""
    if sys.platform == "linux":
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(f"peerloom-{name}", flags)
        os.truncate(descriptor, size)
        if size:
            # If a file shrinks under a mapping, every process that reads the mapping is killed.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    else:
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            descriptor = os.dup(file.fileno())
    return descriptor
