"""A sandboxed process can compute but reaches nothing else. Real processes try it on this kernel.

If the kernel lacks a fence, the report says so, and the tests that need only that fence are skipped.
"""

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.stages import sandbox, seccomp
from node.stages.fences import try_fences
from tests.source import ROOT

ALLOW, KILL, NO_SUCH_CALL, REFUSED = 0x7FFF0000, 0x80000000, 0x00050000 | 38, 0x00050000 | 1
COLUMNS = {machine: column for machine, (column, _) in seccomp.ARCHITECTURES.items()}
FREELY = (
    seccomp.MEMORY
    | seccomp.THREADS
    | seccomp.SIGNALS_AND_CLOCKS
    | seccomp.DESCRIPTORS
    | seccomp.LOOKING
    | seccomp.MACHINE
)
# System calls that are decided by their arguments, for each architecture.
CLONE, MMAP, OPENAT, PRLIMIT, SENDTO, TGKILL = (
    (56, 220),
    (9, 222),
    (257, 56),
    (302, 261),
    (44, 206),
    (234, 131),
)
PRCTL, FCNTL, IOCTL, OPEN = (157, 167), (72, 25), (16, 29), (2, None)
BY_ARGUMENTS = (CLONE, MMAP, OPENAT, PRLIMIT, SENDTO, TGKILL, PRCTL, FCNTL, IOCTL, OPEN)
PID = 4321
THREAD_FLAGS = 0x3D0F00  # the flags with which glibc makes a thread
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@dataclass(frozen=True)
class Tried:
    """Return the report of a sandboxed process about its fences and its attempts."""

    fences: str
    unfenced: str
    results: dict[str, str]

    def refused(self, attempt: str, error: str, *, by: str) -> None:
        """Check that an attempt failed with this error if the fence that prevents the attempt is in place."""
        if by not in self.fences:
            pytest.skip(f"this kernel: {self.unfenced}")
        assert self.results[attempt] == error


def fenced(folder: Path, device: str) -> Tried:
    scratch = folder / "scratch"
    scratch.mkdir()
    secret = folder / "secret"
    secret.write_text("a key")
    surroundings = sandbox.environment(os.environ, scratch=str(scratch), path=str(ROOT), threads=2)
    printed = subprocess.run(
        [sys.executable, "-P", "-m", "tests.node.fenced", device, str(secret)],
        cwd=scratch,
        env=surroundings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    ).stdout
    said = json.loads(printed)
    return Tried("\n".join(said["fences"]), "\n".join(said["unfenced"]), said["results"])


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    return fenced(tmp_path_factory.mktemp("cpu"), "cpu")


@pytest.fixture(scope="module")
def tried_with_accelerator(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    return fenced(tmp_path_factory.mktemp("accelerator"), "cuda:0")


@pytest.mark.parametrize(
    "attempt",
    [
        "multiply with two threads",
        "convolve and go back",
        "load more of torch",
        "start a thread",
        "use an open socket",
        "take memory",
        "read its source",
    ],
)
def test_a_sandboxed_stage_can_do_its_work(tried: Tried, attempt: str) -> None:
    assert tried.results[attempt] == "done"


@pytest.mark.parametrize(
    "attempt",
    [
        "make a socket",
        "make a socket pair",
        "connect what was a socket",
        "send an address",
        "run a program",
        "become a program",
        "fork",
        "kill its parent",
        "trace its parent",
        "read its parent's memory",
        "change a mode",
        "be less nice",
    ],
)
@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_network_programs_and_other_processes_cannot_be_reached(
    request: pytest.FixtureRequest, device: str, attempt: str
) -> None:
    tried: Tried = request.getfixturevalue("tried" if device == "cpu" else "tried_with_accelerator")
    tried.refused(attempt, "EPERM", by="seccomp")


@pytest.mark.parametrize(
    "attempt",
    [
        "read a secret",
        "write outside",
        "write to its source",
        "open its parent's memory",
        "open its parent's environment",
    ],
)
@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_files_outside_the_scratch_folder_cannot_be_opened(
    request: pytest.FixtureRequest, device: str, attempt: str
) -> None:
    tried: Tried = request.getfixturevalue("tried" if device == "cpu" else "tried_with_accelerator")
    tried.refused(attempt, "EACCES", by="landlock")


def test_only_accelerator_drivers_may_write_to_the_scratch_folder(
    tried: Tried, tried_with_accelerator: Tried
) -> None:
    tried.refused("write inside", "EACCES", by="landlock")
    assert tried_with_accelerator.results["write inside"] == "done"


def test_memory_descriptors_and_files_are_limited(tried: Tried) -> None:
    assert tried.results["open many files"] == "EMFILE"
    assert tried.results["raise a limit"] == "ValueError"
    tried.refused("write a large file", "EACCES", by="landlock")
    tried.refused("take too much memory", "MemoryError", by="memory")
    tried.refused("make too large a tensor", "RuntimeError", by="memory")
    tried.refused("share memory that nobody counts", "EPERM", by="seccomp")
    tried.refused("make a file of memory", "EPERM", by="seccomp")


def test_an_accelerators_memory_is_reported_as_watched_only(tried_with_accelerator: Tried) -> None:
    assert "memory: watched by the node" in tried_with_accelerator.fences
    assert tried_with_accelerator.results["take too much memory"] == "done"


def test_files_of_a_process_with_an_accelerator_are_limited(tried_with_accelerator: Tried) -> None:
    tried_with_accelerator.refused("write a large file", "EFBIG", by="landlock")


def test_every_fence_is_either_in_place_or_reported_as_missing(tried: Tried) -> None:
    for word in ("network", "programs", "files", "memory"):
        assert word in tried.fences + tried.unfenced


def test_without_landlock_no_file_is_opened_for_writing(tmp_path: Path) -> None:
    program = (
        "import os; from node.stages.sandbox import _Kernel; kernel = _Kernel()\n"
        "kernel.forbid_new_privileges(); kernel.filter_calls(files_fenced=False, accelerator=False)\n"
        "for path, flags in (('.', os.O_RDONLY), ('new', os.O_WRONLY | os.O_CREAT), ('new', os.O_RDWR)):\n"
        "    try: os.close(os.open(path, flags)); print('done')\n"
        "    except OSError as error: print(error.errno)\n"
        "try: os.mkdir('new')\n"
        "except OSError as error: print(error.errno)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "OSError" in ended.stderr or "KeyError" in ended.stderr:
        pytest.skip("this kernel has no seccomp filters")
    assert ended.stdout.split() == ["done", "1", "1", "1"]


WITHOUT_LANDLOCK = (sys.executable, "-m", "tests.node.without_landlock", sys.executable)


def ended(*program: str, folder: Path, command: tuple[str, ...] = (sys.executable,)) -> tuple[int, str, str]:
    """Run a Python program in `folder`. Return its status, output and last error line."""
    process = subprocess.run(
        [*command, *program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "Invalid argument" in process.stderr and "without_landlock" in process.stderr:
        pytest.skip("this kernel has no seccomp filters")
    return process.returncode, process.stdout, process.stderr.strip().rpartition("\n")[2]


ENTER = (
    "import os, threading; from node.stages import sandbox\n"
    "{before}\n"
    "found = sandbox.enter(scratch='.', device='cpu', memory_bytes=1 << 28, allow_unfenced={allow})\n"
    "print(found.unfenced)"
)


@pytest.mark.parametrize("allow", [False, True])
def test_a_thread_started_earlier_is_an_error_and_skips_no_fence(tmp_path: Path, allow: bool) -> None:
    start = "threading.Thread(target=threading.Event().wait, daemon=True, name='early').start()"
    status, output, error = ended("-c", ENTER.format(before=start, allow=allow), folder=tmp_path)
    assert (status, output) == (1, "")
    assert "NotFenced: other threads are already running" in error


@pytest.mark.skipif(sys.platform != "linux", reason="landlock is Linux's")
def test_without_landlock_no_process_is_fenced_unless_allowed(tmp_path: Path) -> None:
    strict = ENTER.format(before="", allow=False)
    status, output, error = ended("-c", strict, folder=tmp_path, command=WITHOUT_LANDLOCK)
    assert (status, output) == (1, "")
    assert "NotFenced: files: no landlock" in error
    allowed = ENTER.format(before="", allow=True)
    status, output, _ = ended("-c", allowed, folder=tmp_path, command=WITHOUT_LANDLOCK)
    assert status == 0
    assert "files: no landlock" in output


def test_the_trial_of_the_fences_predicts_the_fences_of_a_stage(tried: Tried, tmp_path: Path) -> None:
    found = try_fences("cpu")
    assert [line.partition(":")[0] for line in found.fences] == [
        line.partition(":")[0] for line in tried.fences.splitlines()
    ]
    assert "\n".join(found.unfenced) == tried.unfenced
    if sys.platform == "linux":
        program = "from node.stages.fences import try_fences; print(try_fences('cpu').unfenced)"
        status, output, _ = ended("-c", program, folder=tmp_path, command=WITHOUT_LANDLOCK)
        assert status == 0
        assert "files: no landlock" in output


def test_a_failed_trial_counts_as_no_fences() -> None:
    assert "the trial failed" in try_fences("cpu", "/nowhere/python").unfenced[0]


INTERRUPTED = """
import signal
from node.stages.fences import try_fences
signal.signal(signal.SIGINT, lambda *_: None)
print("begins", flush=True)
print(try_fences("cpu").unfenced, flush=True)
"""


def test_ctrl_c_does_not_end_a_trial_of_fences() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        while not is_tried_by(process.pid):
            assert process.poll() is None, "the trial ended before the interrupt"
        os.killpg(process.pid, signal.SIGINT)
        assert "the trial failed" not in process.stdout.read()


def is_tried_by(pid: int) -> bool:
    """Return whether a child of this process runs the trial of the fences now."""
    with contextlib.suppress(psutil.Error):
        return any("node.stages.trial" in child.cmdline() for child in psutil.Process(pid).children())
    return False


def test_the_environment_keeps_only_what_arithmetic_needs() -> None:
    given = {
        "PATH": "/bin",
        "HOME": "/home/someone",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "PEERLOOM_SWARM_KEY": "hush",
        "LD_LIBRARY_PATH": "/opt/lib",
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "64",
        "LC_ALL": "C",
    }
    made = sandbox.environment(given, scratch="/scratch", path="/src", threads=3)
    assert "hush" not in made.values()
    assert "PATH" not in made
    assert made["HOME"] == made["TMPDIR"] == "/scratch"
    assert made["OMP_NUM_THREADS"] == "3"
    assert made["OMP_WAIT_POLICY"] == "PASSIVE", (
        "idle threads spin, which slows down the threads that they wait for"
    )
    assert (made["LD_LIBRARY_PATH"], made["CUDA_VISIBLE_DEVICES"], made["LC_ALL"]) == ("/opt/lib", "0", "C")


# The filter itself, for both architectures, run by an interpreter for BPF.


def judge(
    machine: str,
    number: int,
    arguments: tuple[int, ...] = (),
    *,
    architecture: int | None = None,
    files_fenced: bool = True,
    accelerator: bool = False,
) -> int:
    """Return the filter's verdict on a system call."""
    filtered = seccomp.compile_filter(machine, PID, files_fenced=files_fenced, accelerator=accelerator)
    kernels_name = seccomp.ARCHITECTURES[machine][1] if architecture is None else architecture
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("<IIQ6Q", number, kernels_name, 0, *padded)
    program: list[tuple[int, int, int, int]] = list(struct.iter_unpack("=HBBI", filtered))
    accumulator, place = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                place += if_true if accumulator == operand else if_false
            case 0x35:
                place += if_true if accumulator >= operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"instruction {code:#x}")


@pytest.mark.parametrize("machine", COLUMNS)
def test_each_system_call_is_answered_as_the_tables_say(machine: str) -> None:
    column = COLUMNS[machine]
    for calls, answer in ((FREELY, ALLOW), (seccomp.CHANGING, ALLOW), (seccomp.REFUSED, REFUSED)):
        for name, numbers in calls.items():
            if (number := numbers[column]) is not None:
                assert judge(machine, number) == answer, name
    clone3, openat2 = 435, 437
    assert judge(machine, clone3) == judge(machine, openat2) == NO_SUCH_CALL


@pytest.mark.parametrize("machine", COLUMNS)
@given(number=st.integers(0, 2**32 - 1), arguments=st.tuples(*[st.integers(0, 2**64 - 1)] * 6))
def test_no_system_call_outside_the_tables_is_ever_allowed(
    machine: str, number: int, arguments: tuple[int, ...]
) -> None:
    column = COLUMNS[machine]
    known = {numbers[column] for numbers in (*FREELY.values(), *seccomp.CHANGING.values(), *BY_ARGUMENTS)}
    if judge(machine, number, arguments) == ALLOW:
        assert number in known


@pytest.mark.parametrize("machine", COLUMNS)
def test_a_system_call_of_a_different_architecture_kills_the_process(machine: str) -> None:
    other = next(name for machine_, (_, name) in seccomp.ARCHITECTURES.items() if machine_ != machine)
    assert judge(machine, 0, architecture=other) == KILL
    assert judge("x86_64", 0x40000000 | 1) == KILL


@pytest.mark.parametrize(
    ("call", "arguments", "answer"),
    [
        (CLONE, (THREAD_FLAGS,), ALLOW),
        (CLONE, (17,), REFUSED),  # fork: SIGCHLD alone
        (CLONE, (0x4111,), REFUSED),  # vfork
        (CLONE, (THREAD_FLAGS | 0x40000000,), REFUSED),  # a thread in a network namespace of its own
        (MMAP, (0, 4096, 3, 0x22), ALLOW),  # private memory
        (MMAP, (0, 4096, 3, 0x01), ALLOW),  # a shared file: the arenas
        (MMAP, (0, 4096, 3, 0x21), REFUSED),
        (TGKILL, (PID, PID, 6), ALLOW),
        (TGKILL, (PID - 1, PID - 1, 9), REFUSED),
        (PRLIMIT, (0, 7, 0, 4096), ALLOW),
        (PRLIMIT, (0, 7, 4096, 0), REFUSED),
        (PRLIMIT, (0, 7, 1 << 32, 0), REFUSED),
        (PRLIMIT, (1, 7, 0, 4096), REFUSED),
        (SENDTO, (3, 4096, 1, 0, 0, 0), ALLOW),
        (SENDTO, (3, 4096, 1, 0, 4096, 16), REFUSED),
        (SENDTO, (3, 4096, 1, 0, 1 << 32, 16), REFUSED),
        (PRCTL, (15, 4096), ALLOW),
        (PRCTL, (4, 1), REFUSED),
        (FCNTL, (3, 1), ALLOW),
        (FCNTL, (3, 8, 1), REFUSED),
        (FCNTL, (3, 1033, 1), REFUSED),
        (IOCTL, (0, 0x5401), ALLOW),
        (IOCTL, (0, 0x5412), REFUSED),  # TIOCSTI types into a terminal
        (OPENAT, (0, 4096, 0x41), ALLOW),
    ],
)
@pytest.mark.parametrize("machine", COLUMNS)
def test_system_calls_with_harmful_uses_are_judged_by_their_arguments(
    machine: str, call: tuple[int, int], arguments: tuple[int, ...], answer: int
) -> None:
    assert judge(machine, call[COLUMNS[machine]], arguments) == answer


@pytest.mark.parametrize("machine", COLUMNS)
def test_seccomp_allows_accelerator_calls_and_guards_files_without_landlock(machine: str) -> None:
    column = COLUMNS[machine]
    assert judge(machine, IOCTL[column], (3, 0xC0184600), accelerator=True) == ALLOW
    assert judge(machine, MMAP[column], (0, 4096, 3, 0x21), accelerator=True) == ALLOW
    assert judge(machine, seccomp.REFUSED["socket"][column] or 0, accelerator=True) == REFUSED
    writing, reading = (0, 4096, 0x1), (0, 4096, 0x80000)
    assert judge(machine, OPENAT[column], reading, files_fenced=False) == ALLOW
    assert judge(machine, OPENAT[column], writing, files_fenced=False) == REFUSED
    assert judge(machine, seccomp.CHANGING["unlinkat"][column] or 0, files_fenced=False) == REFUSED


@pytest.mark.parametrize("machine", COLUMNS)
def test_the_filter_fits_the_kernels_size_limit(machine: str) -> None:
    filtered = seccomp.compile_filter(machine, PID, files_fenced=True, accelerator=True)
    assert len(filtered) // 8 <= seccomp.INSTRUCTIONS_MAX


@pytest.mark.parametrize("machine", COLUMNS)
def test_call_numbers_match_the_kernels_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"no {header} on this machine")
    numbers = {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    }
    # The generic header lists two of the calls under the names that they had before 64 bits.
    renamed = {"fadvise64": numbers.get("fadvise64"), "newfstatat": numbers.get("fstatat")}
    for calls in (FREELY, seccomp.CHANGING, seccomp.ACCELERATOR, seccomp.REFUSED):
        for name, row in calls.items():
            wanted = numbers.get(name, renamed.get(name))
            assert row[COLUMNS[machine]] == wanted, name
