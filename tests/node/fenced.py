"""A process that fences itself in and then acts as an intruder: `python -m tests.node.fenced`.

Its arguments are the device and a file that it must not read; its scratch folder is the current folder. It
prints JSON: which fences hold, and for each attempt the name of the error, or `done` if the attempt
succeeded.
"""

import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from node.stages import sandbox

MEMORY_BYTES = 256 << 20
TOO_MUCH_BYTES = 1 << 30
PTRACE_ATTACH = 16


def main(device: str, secret: str) -> None:
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    before, after = socket.socketpair()
    attempts: dict[str, Callable[[], object]] = {
        "make a socket": socket.socket,
        "make a socket pair": socket.socketpair,
        "connect what was a socket": lambda: before.connect("/nowhere"),
        "send an address": lambda: before.sendto(b"x", "/nowhere"),
        "use an open socket": lambda: before.send(b"x") == len(after.recv(1)),
        "run a program": lambda: subprocess.run(["/bin/true"], check=True),
        "become a program": lambda: os.execv("/bin/true", ["true"]),
        "fork": os.fork,
        "start a thread": _thread,
        "kill its parent": lambda: os.kill(parent, signal.SIGKILL),
        "trace its parent": lambda: _checked(libc.ptrace(PTRACE_ATTACH, parent, 0, 0)),
        "read its parent's memory": lambda: _checked(libc.process_vm_readv(parent, None, 0, None, 0, 0)),
        "open its parent's memory": lambda: _open(f"/proc/{parent}/mem"),
        "open its parent's environment": lambda: _open(f"/proc/{parent}/environ"),
        "read a secret": lambda: _open(secret),
        "write outside": lambda: _open(secret + ".outside", "w"),
        "write to its source": lambda: _open(sandbox.__file__, "r+"),
        "read its source": lambda: _open(sandbox.__file__),
        "write inside": lambda: _open("inside", "w"),
        "change a mode": lambda: os.chmod(".", 0o777),
        "write a large file": lambda: _write("large", sandbox.FILE_BYTES_MAX + 1),
        "open many files": _open_many,
        "take memory": lambda: bytearray(MEMORY_BYTES // 2),
        "take too much memory": lambda: bytearray(TOO_MUCH_BYTES),
        "share memory that nobody counts": lambda: mmap.mmap(-1, mmap.PAGESIZE),
        "make a file of memory": lambda: os.memfd_create("memory"),
        "raise a limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
        "be less nice": lambda: os.nice(-1),
    }
    if device == "cpu":
        attempts |= _arithmetic()
    fenced = sandbox.enter(scratch=os.getcwd(), device=device, memory_bytes=MEMORY_BYTES, allow_unfenced=True)
    results = {name: _result(attempt) for name, attempt in attempts.items()}
    sys.stdout.write(json.dumps({"fences": fenced.fences, "unfenced": fenced.unfenced, "results": results}))


def _arithmetic() -> dict[str, Callable[[], object]]:
    import torch

    def multiply() -> None:
        torch.set_num_threads(2)
        square = torch.ones(300, 300, requires_grad=True)
        torch.autograd.backward((square @ square).sum())
        assert square.grad is not None
        assert square.grad.sum() == 2 * 300**3
        assert len(os.listdir("/proc/self/task")) > 1

    def convolve() -> None:
        image = torch.ones(2, 8, 16, 16, requires_grad=True)
        torch.autograd.backward(torch.nn.functional.conv2d(image, torch.ones(8, 8, 3, 3)).sum())
        assert image.grad is not None

    def load() -> None:
        # Both attempts load libraries and modules that nothing has used yet.
        assert torch.linalg.svd(torch.eye(8))[1].sum() == 8
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            assert (torch.empty(4, 8) @ torch.empty(8, 4)).shape == (4, 4)

    return {
        "multiply with two threads": multiply,
        "convolve and go back": convolve,
        "load more of torch": load,
        "make too large a tensor": lambda: torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8),
    }


def _result(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "?")
    except BaseException as error:
        return type(error).__name__
    return "done"


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")


def _open(path: str, mode: str = "r") -> None:
    with open(path, mode + "b") as file:
        if mode == "r":
            file.read(1)


def _write(path: str, size: int) -> None:
    with open(path, "wb") as file:
        file.write(bytes(size))


def _open_many() -> None:
    descriptors: list[int] = []
    try:
        while len(descriptors) < sandbox.DESCRIPTORS_MAX:
            descriptors.append(os.dup(0))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _thread() -> None:
    ran = threading.Event()
    thread = threading.Thread(target=ran.set)
    thread.start()
    thread.join()
    assert ran.is_set()


if __name__ == "__main__":
    main(*sys.argv[1:])
