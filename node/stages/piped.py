"""A process with two pipes, started by the event loop's own thread, so that it always ends with this process.

`trio.lowlevel.open_process` starts processes from a pool thread, which ends after ten idle seconds. A child
that is killed when its parent dies (`prctl(PR_SET_PDEATHSIG)`, see its notes) would be killed when that
thread ends.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

import trio

from node.forks import keep_from_children

_READ_BYTES = 65_536


class PipedProcess:
    """A process, started by the constructor; `aclose` must be called at the end. Raises OSError if it cannot
    be started."""

    def __init__(self, command: Sequence[str], *, cwd: str, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own program and arguments
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=cwd,
            env=env,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = trio.lowlevel.FdStream(os.dup(self._process.stdin.fileno()))
        self._stdout = trio.lowlevel.FdStream(os.dup(self._process.stdout.fileno()))
        self._process.stdin.close()
        self._process.stdout.close()
        keep_from_children(self._stdin, self._stdout)

    @property
    def status(self) -> int | None:
        """The process's exit status; None while it runs."""
        return self._process.returncode

    async def send(self, data: bytes) -> None:
        """Write all bytes. Raises trio.BrokenResourceError, trio.ClosedResourceError."""
        await self._stdin.send_all(data)

    async def end_input(self) -> None:
        """Close its input, so that the process reads the end."""
        await self._stdin.aclose()

    async def receive(self) -> bytes:
        """Return the next output; empty at the end. Raises trio.ClosedResourceError."""
        return bytes(await self._stdout.receive_some(_READ_BYTES))

    async def aclose(self) -> None:
        """End the process; may be called again."""
        with trio.CancelScope(shield=True):
            await self._stdin.aclose()
            await self._stdout.aclose()
            if self._process.poll() is None:
                self._process.kill()
            await trio.to_thread.run_sync(self._process.wait)
