"""The fences that a stage's process puts up before it reads any byte chosen by an unknown peer.

No code of unknown peers runs in a stage; the fences are for a graph that exploits a bug in torch. An
exploited process can reach nothing of value. It has no network, and no access to other programs or processes.
It can read only Python's own files, and write only to its scratch folder, for an accelerator's driver. The
kernel limits its memory.

    seccomp     an allow-list of system calls (`node.stages.seccomp`)
    landlock    the paths that may be read and written; none may be executed
    namespaces  an empty network, and no privileges in the machine's own namespace
    limits      memory, descriptors, the size of files, no core dumps, a lower CPU priority

If the system lacks a fence, that is an error unless `allow_unfenced`: the machine's owner decides, and the
report lists the fences that hold and those that do not. A second thread is always an error, because Landlock
fences only the calling thread. An accelerator's driver needs devices and address space, so with one some
fences are weaker. This is not a container: only the limits above bound the number of threads, and with an
accelerator only the watch bounds the size of its files (`node.stages.scratch`). Sources: seccomp(2),
landlock(7), unshare(2), getrlimit(2).
"""

import contextlib
import ctypes
import errno
import glob
import os
import resource
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from node.services.arithmetic import arithmetic_settings
from node.stages.seccomp import ARCHITECTURES, compile_filter

DESCRIPTORS_MAX = 256
"""Maximum number of open descriptors. A stage has about ten open, an accelerator's driver about fifty."""
FILE_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of a file that the process writes. This includes its stderr, which is in the node's memory."""
NICE = 5
"""Nice value: the node's own event loop, and the person at the machine, have priority."""

_ENVIRONMENT = ("LANG", "LANGUAGE", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
_PACKAGES = ("crypto", "node", "partition")

_PR_SET_NO_NEW_PRIVS = 38
_O_PATH = getattr(os, "O_PATH", 0)
"""Only Linux, which has Landlock, defines it."""
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER, _SECCOMP_TSYNC = 1, 1
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULESET_VERSION, _RULE_PATH = 1, 1
# The bits of landlock(7), "Filesystem actions".
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_IOCTL_DEV = 1 << 15
_READ = _READ_FILE | _READ_DIR
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | _IOCTL_DEV
_HANDLED = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All actions that Landlock can handle, by the version that extended them."""
_NET_VERSION, _NET = 4, 0b11
_SCOPE_VERSION, _SCOPE = 6, 0b11


class NotFenced(Exception):
    """A fence is missing and not waived. The text says which and why."""


@dataclass(frozen=True)
class Fenced:
    """The fences that hold, with their means, and those that do not, with the reason. Each line fits on a
    screen."""

    fences: tuple[str, ...]
    unfenced: tuple[str, ...]


def environment(given: Mapping[str, str], *, scratch: str, path: str, threads: int) -> dict[str, str]:
    """Return the environment of a stage's process. It keeps only arithmetic settings from the node's own
    environment."""
    kept = {name: value for name, value in given.items() if name in _ENVIRONMENT}
    return (
        kept
        | arithmetic_settings(given)
        | {
            "HOME": scratch,
            "TMPDIR": scratch,
            # Some of torch's modules create this folder when loaded. The default folder may not be writable.
            "TORCHINDUCTOR_CACHE_DIR": scratch,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": str(threads),
            # If another process uses a core, spinning threads take CPU time from the threads that they wait
            # for. A step of a small GPT with two threads took over 5 s with spinning, and 0.04-0.36 s
            # without.
            "OMP_WAIT_POLICY": given.get("OMP_WAIT_POLICY", "PASSIVE"),
            # numpy is used here only for packing. Its threads would start before the fences, which would not
            # cover them.
            "OPENBLAS_NUM_THREADS": "1",
            # cuBLAS reads this when it is loaded. Without it, sums may differ from run to run.
            "CUBLAS_WORKSPACE_CONFIG": given.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        }
    )


def enter(
    *,
    scratch: str,
    device: str,
    memory_bytes: int,
    allow_unfenced: bool = False,
    readable: Sequence[str] = (),
    may_be_raised: bool = False,
) -> Fenced:
    """Fence this process in permanently. Call it after all imports and before any thread is started.

    With an accelerator, `scratch` is the only folder that the process may write to afterwards; without one,
    it may write to none. `memory_bytes` is how much memory it may use in addition to its present memory. With
    `allow_unfenced`, fences that this system lacks are not an error. `readable` are additional files and
    folders that it may read. With `may_be_raised`, the process's starter may later change its memory limit;
    this requires seccomp, which keeps the process itself from setting limits.

    Raises:
        NotFenced: a fence failed; the others stay. Or another thread already runs, which is never waived: it
            would be outside some fences, and could act for this thread.
    """
    if others := _other_threads():
        raise NotFenced(
            f"other threads are already running, and some fences would not cover them: {', '.join(others)}"
        )
    fenced = _fence(scratch, device, memory_bytes, readable, may_be_raised=may_be_raised)
    if fenced.unfenced and not allow_unfenced:
        raise NotFenced("; ".join(fenced.unfenced))
    return fenced


def _fence(
    scratch: str, device: str, memory_bytes: int, readable: Sequence[str], *, may_be_raised: bool
) -> Fenced:
    tempfile.tempdir = scratch  # otherwise tempfile finds a folder by test writes
    accelerator = device != "cpu"
    fences: list[str] = []
    unfenced: list[str] = []
    _limit(memory_bytes, device, fences, unfenced, may_be_raised=may_be_raised)
    if sys.platform != "linux":
        unfenced.append(f"network, programs, files: no fences are known for {sys.platform}")
        return Fenced(tuple(fences), tuple(unfenced))
    kernel = _Kernel()
    namespaces = "an accelerator" if accelerator else _try(kernel.leave_namespaces)
    kernel.forbid_new_privileges()
    landlock, problem = kernel.restrict_files(scratch, readable, accelerator=accelerator)
    seccomp = _try(lambda: kernel.filter_calls(files_fenced=landlock > 0, accelerator=accelerator))
    if seccomp and not accelerator:
        _lower(
            resource.RLIMIT_DATA, resource.getrlimit(resource.RLIMIT_DATA)[0]
        )  # without seccomp, the process could raise the limit
    by = [name for name, missing in (("seccomp", seccomp), ("namespaces", namespaces)) if not missing]
    if landlock:
        by.append(f"landlock {landlock}")
        written = "only its scratch" if accelerator else "none"
        fences.append(
            f"files: reads only what Python and torch need, writes {written}, by landlock {landlock}"
        )
    else:
        unfenced.append(f"files: no landlock ({problem})")
        if not seccomp and not accelerator:
            fences.append("files: may open none for writing, by seccomp")
    if seccomp:
        unfenced.append(f"network, programs, other processes: no seccomp ({seccomp})")
    if by:
        fences.append(f"network, programs, other processes: {', '.join(by)}")
    return Fenced(tuple(fences), tuple(unfenced))


def _limit(
    memory_bytes: int, device: str, fences: list[str], unfenced: list[str], *, may_be_raised: bool
) -> None:
    """Set the limits that every Unix has, and on Linux also the memory limit and the OOM score."""
    os.nice(NICE)
    for limit, wanted in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (resource.RLIMIT_FSIZE, FILE_BYTES_MAX),
    ):
        _lower(limit, wanted)
    fences.append(
        f"limits: {DESCRIPTORS_MAX} descriptors, files of {FILE_BYTES_MAX >> 20} MiB, no core dumps, "
        f"nice {NICE}"
    )
    if sys.platform == "linux" and device == "cpu":
        # This limits written memory, not the whole address space, most of which torch's libraries only
        # reserve.
        _lower(resource.RLIMIT_DATA, _data_bytes() + memory_bytes, for_good=not may_be_raised)
        fences.append(f"memory: {memory_bytes >> 20} MiB in addition to arenas and libraries, by the kernel")
    elif sys.platform == "linux":
        # A driver's address space exceeds any limit. The watch ends a process that uses too much memory
        # within a second, and the kernel kills this process before any other.
        fences.append(f"memory: watched by the node, without a kernel limit for {device}")
    else:
        unfenced.append(f"memory: the kernel sets no limit on {sys.platform}, so the node only watches it")
    if sys.platform == "linux":
        # If the machine still runs out of memory, the kernel must kill the stage, not the node.
        Path("/proc/self/oom_score_adj").write_text("1000")


def _other_threads() -> list[str]:
    """Return the names of the other threads; on systems other than Linux, only those that Python knows."""
    if sys.platform != "linux":
        return [each.name for each in threading.enumerate() if each is not threading.current_thread()]
    found = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != threading.get_native_id():
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                found.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return found


def _lower(limit: int, wanted: int, *, for_good: bool = True) -> None:
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(limit, (wanted, wanted if for_good else hard))


def _data_bytes() -> int:
    """Return how much memory of this process RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _try(fence: Callable[[], None]) -> str:
    """Set up a fence; return why it failed, or '' if it holds."""
    try:
        fence()
    except OSError as error:
        return os.strerror(error.errno or errno.EINVAL)
    except KeyError as error:
        return f"unknown architecture {error.args[0]}"
    return ""


class _Kernel:
    """System calls that Python does not wrap; their errors are raised."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def leave_namespaces(self) -> None:
        """Enter an empty network namespace, and a user namespace in which earlier privileges do not count."""
        self._check(self._libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET))

    def forbid_new_privileges(self) -> None:
        self._check(self._libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))

    def filter_calls(self, *, files_fenced: bool, accelerator: bool) -> None:
        machine = os.uname().machine
        filtered = compile_filter(machine, os.getpid(), files_fenced=files_fenced, accelerator=accelerator)
        program = ctypes.create_string_buffer(filtered, len(filtered))
        # struct sock_fprog: the number of eight-byte instructions, and their address.
        header = ctypes.create_string_buffer(
            struct.pack("@HP", len(filtered) // 8, ctypes.addressof(program))
        )
        self._call(_SECCOMP[machine], _SECCOMP_SET_MODE_FILTER, _SECCOMP_TSYNC, header)

    def restrict_files(self, scratch: str, readable: Sequence[str], *, accelerator: bool) -> tuple[int, str]:
        """Restrict file access. Return Landlock's version and '', or 0 and why it failed."""
        if os.uname().machine not in ARCHITECTURES:
            return 0, f"unknown architecture {os.uname().machine}"
        try:
            version = self._call(_CREATE_RULESET, None, 0, _RULESET_VERSION)
            handled = max(actions for first, actions in _HANDLED.items() if first <= version)
            attributes = struct.pack(
                "=QQQ",
                handled,
                _NET if version >= _NET_VERSION else 0,
                _SCOPE if version >= _SCOPE_VERSION else 0,
            )
            # A kernel refuses an attribute longer than its own only if the excess is not zero.
            buffer = ctypes.create_string_buffer(attributes, len(attributes))
            ruleset = self._call(_CREATE_RULESET, buffer, len(attributes), 0)
            try:
                paths = chain(
                    _open_paths(scratch, accelerator=accelerator), ((path, _READ) for path in readable)
                )
                for path, actions in paths:
                    self._allow_beneath(ruleset, path, actions & handled)
                self._call(_RESTRICT_SELF, ruleset, 0)
            finally:
                os.close(ruleset)
        except OSError as error:
            return 0, os.strerror(error.errno or errno.EINVAL)
        return version, ""

    def _allow_beneath(self, ruleset: int, path: str, actions: int) -> None:
        try:
            place = os.open(path, _O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # a missing path needs no permission
        try:
            if not os.path.isdir(path):
                actions &= _ON_FILES
            rule = ctypes.create_string_buffer(struct.pack("=Qi", actions, place), 12)
            self._call(_ADD_RULE, ruleset, _RULE_PATH, rule, 0)
        finally:
            os.close(place)

    def _call(self, number: int, *arguments: object) -> int:
        wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
        return self._check(self._libc.syscall(ctypes.c_long(number), *wide))

    def _check(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def _open_paths(scratch: str, *, accelerator: bool) -> Iterator[tuple[str, int]]:
    """Yield the paths that stay accessible, with the allowed actions; links in them are followed."""
    # An accelerator's driver stores compiled kernels there. CPU arithmetic writes nothing, so it may not
    # write.
    yield scratch, ~(_EXECUTE | _IOCTL_DEV) if accelerator else _READ
    yield "/dev/null", _READ_FILE | _WRITE_FILE
    for path in _readable():
        yield path, _READ
    if accelerator:
        # Not all of /proc, which contains the environments of other processes.
        for path in ("/proc/devices", "/proc/driver", "/proc/modules", "/proc/sys", "/sys", "/etc/nvidia"):
            yield path, _READ
        for path in (*glob.glob("/dev/nvidia*"), "/dev/dri", "/dev/kfd", "/dev/shm"):  # noqa: S108 - the driver's
            yield path, _READ | _WRITE_FILE | _IOCTL_DEV


def _readable() -> Iterator[str]:
    """Yield the paths of Python, torch and the system's libraries, and of the files about the machine that
    the C library reads."""
    source = str(Path(__file__).parents[2])
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix)
    # A checkout may contain the node's data folder with its key, so allow only our packages in it.
    yield from (path for path in sys.path if path and path != source)
    yield from (f"{source}/{package}" for package in _PACKAGES)
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    yield from ("/usr", "/lib", "/lib64", "/opt/rocm", "/etc/ld.so.cache", "/dev/urandom", "/dev/zero")
    yield from (
        "/proc/self",
        "/proc/cpuinfo",
        "/proc/meminfo",
        "/proc/stat",
        "/proc/sys/vm",
        "/sys/devices/system",
    )
