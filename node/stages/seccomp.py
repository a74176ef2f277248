"""The system calls that a stage's process may make: an allow-list, compiled to a seccomp filter.

Arithmetic needs memory, threads, clocks and open files. Calls not named here "do not exist" (ENOSYS), so that
libraries fall back to older calls, and calls of later kernels are refused too. Calls that an intruder would
want (sockets, other programs, other processes) are refused by name (EPERM), so that an error shows what
happened. A call of a foreign architecture kills the process.

This file has only data and its compiler; `node.stages.sandbox` passes the program to the kernel. The filter
language is classic BPF (linux/filter.h, linux/seccomp.h). The numbers are those of asm/unistd_64.h and
asm-generic/unistd.h; None if an architecture lacks a call.
"""

import errno
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ARCHITECTURES: dict[str, tuple[int, int]] = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""For each `os.uname().machine`: the column in the tables below, and the kernel's number of the
architecture."""
INSTRUCTIONS_MAX = 4_096
"""The kernel's limit (BPF_MAXINSNS)."""

Numbers = tuple[int | None, int | None]

MEMORY: dict[str, Numbers] = {
    "brk": (12, 214), "get_mempolicy": (239, 236), "madvise": (28, 233), "mbind": (237, 235),
    "membarrier": (324, 283), "mincore": (27, 232), "mlock": (149, 228), "mprotect": (10, 226),
    "mremap": (25, 216), "msync": (26, 227), "munlock": (150, 229), "munmap": (11, 215),
    "set_mempolicy": (238, 237),
}  # fmt: skip
THREADS: dict[str, Numbers] = {
    "arch_prctl": (158, None), "exit": (60, 93), "exit_group": (231, 94), "futex": (202, 98),
    "get_robust_list": (274, 100), "getcpu": (309, 168), "getpid": (39, 172), "getppid": (110, 173),
    "gettid": (186, 178), "restart_syscall": (219, 128), "rseq": (334, 293),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_yield": (24, 124), "set_robust_list": (273, 99), "set_tid_address": (218, 96),
}  # fmt: skip
SIGNALS_AND_CLOCKS: dict[str, Numbers] = {
    "clock_getres": (229, 114), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169), "nanosleep": (35, 101), "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132),
    "time": (201, None), "timer_create": (222, 107), "timer_delete": (226, 111),
    "timer_settime": (223, 110), "times": (100, 153),
}  # fmt: skip
DESCRIPTORS: dict[str, Numbers] = {
    "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_pwait": (281, 22),
    "epoll_wait": (232, None), "eventfd2": (290, 19), "fadvise64": (221, 223), "fdatasync": (75, 83),
    "flock": (73, 32), "fsync": (74, 82), "getpeername": (52, 205), "getsockname": (51, 204),
    "getsockopt": (55, 209), "lseek": (8, 62), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None),
    "ppoll": (271, 73), "pread64": (17, 67), "preadv": (295, 69), "pselect6": (270, 72),
    "pwrite64": (18, 68), "pwritev": (296, 70), "read": (0, 63), "readv": (19, 65), "recvfrom": (45, 207),
    "recvmsg": (47, 212), "select": (23, None), "sendmsg": (46, 211), "setsockopt": (54, 208),
    "shutdown": (48, 210), "write": (1, 64), "writev": (20, 66),
}  # fmt: skip
LOOKING: dict[str, Numbers] = {
    "access": (21, None), "chdir": (80, 49), "faccessat": (269, 48), "faccessat2": (439, 439),
    "fstat": (5, 80), "fstatfs": (138, 44), "getcwd": (79, 17), "getdents": (78, None),
    "getdents64": (217, 61), "lstat": (6, None), "newfstatat": (262, 79), "readlink": (89, None),
    "readlinkat": (267, 78), "stat": (4, None), "statfs": (137, 43), "statx": (332, 291),
    "umask": (95, 166),
}  # fmt: skip
MACHINE: dict[str, Numbers] = {
    "getegid": (108, 177), "geteuid": (107, 175), "getgid": (104, 176), "getgroups": (115, 158),
    "getpgid": (121, 155), "getpgrp": (111, None), "getpriority": (140, 141), "getrandom": (318, 278),
    "getresgid": (120, 150), "getresuid": (118, 148), "getrlimit": (97, 163), "getrusage": (98, 165),
    "getsid": (124, 156), "getuid": (102, 174), "sysinfo": (99, 179), "uname": (63, 160),
}  # fmt: skip
CHANGING: dict[str, Numbers] = {
    "fallocate": (285, 47), "ftruncate": (77, 46), "mkdir": (83, None), "mkdirat": (258, 34),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "rmdir": (84, None),
    "truncate": (76, 45), "unlink": (87, None), "unlinkat": (263, 35),
}  # fmt: skip
"""System calls that change files: allowed only if Landlock restricts them to the scratch folder."""
ACCELERATOR: dict[str, Numbers] = {
    "memfd_create": (319, 279), "sched_setaffinity": (203, 122), "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
}  # fmt: skip
"""Additional calls that an accelerator's driver library needs."""
REFUSED: dict[str, Numbers] = {
    "accept": (43, 202), "accept4": (288, 242), "add_key": (248, 217), "bind": (49, 200),
    "bpf": (321, 280), "chmod": (90, None), "chown": (92, None), "chroot": (161, 51),
    "connect": (42, 203), "creat": (85, None), "execve": (59, 221), "execveat": (322, 281),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchownat": (260, 54), "fork": (57, None),
    "io_uring_setup": (425, 425), "keyctl": (250, 219), "kill": (62, 129), "link": (86, None),
    "linkat": (265, 37), "listen": (50, 201), "memfd_create": (319, 279), "mknodat": (259, 33),
    "mount": (165, 40), "perf_event_open": (298, 241), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "request_key": (249, 218), "rt_sigqueueinfo": (129, 138),
    "sched_setaffinity": (203, 122), "setgid": (106, 144), "setns": (308, 268), "setpriority": (141, 140),
    "setrlimit": (160, 164), "setuid": (105, 146), "shmat": (30, 196), "shmget": (29, 194),
    "socket": (41, 198), "socketpair": (53, 199), "symlink": (88, None), "symlinkat": (266, 36),
    "tkill": (200, 130), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
    "vfork": (58, None),
}  # fmt: skip
"""Calls refused with EPERM. They include memory without a file (memfd, shm), because no limit of the kernel
counts it."""

_THREAD = 0x00010000
_NAMESPACES = 0x7E020080
_SHARED_ANONYMOUS = 0x21
_WRITING = 0x1 | 0x2 | 0x40 | 0x200  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS and TIOCGWINSZ (whether it is a terminal), FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_PRCTLS = (3, 15, 16, 21, 23, 0x53564D41)
"""PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ, PR_SET_VMA."""
_FCNTLS_REFUSED = (8, 10, 15, 1033)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX could signal other processes; F_ADD_SEALS would change the arenas."""
_ALL = 0xFFFFFFFF

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_X32 = 0x40000000
"""Bit of the x32 ABI of x86_64, which is the same architecture with different call numbers."""


@dataclass(frozen=True)
class ArgumentCondition:
    """Tests half of an argument (the lower half, unless `upper`) after masking: it must be among `values` if
    `wanted`, else not."""

    argument: int
    values: Sequence[int]
    mask: int = _ALL
    wanted: bool = True
    upper: bool = False


def compile_filter(machine: str, pid: int, *, files_fenced: bool, accelerator: bool) -> bytes:
    """Return the filter program for a process, as an array of `struct sock_filter`.

    `files_fenced`: Landlock already restricts its writing to its scratch folder; otherwise no file may be
    opened for writing. With an `accelerator`, any `ioctl` is allowed, because its driver requires it.

    Raises: KeyError: an architecture without a table.
    """
    column, name = ARCHITECTURES[machine]
    allowed = MEMORY | THREADS | SIGNALS_AND_CLOCKS | DESCRIPTORS | LOOKING | MACHINE
    if files_fenced:
        allowed = allowed | CHANGING
    if accelerator:
        allowed = allowed | ACCELERATOR
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, name), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for numbers, conditions in _tested(pid, files_fenced=files_fenced, accelerator=accelerator):
        if (number := numbers[column]) is not None:
            block = [*_block(conditions)]
            program += [(_EQUAL, 0, len(block), number), *block]
    for calls, answer in ((allowed, _ALLOW), (REFUSED | CHANGING, _ERRNO | errno.EPERM)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    program.append((_RETURN, 0, 0, _ERRNO | errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _tested(
    pid: int, *, files_fenced: bool, accelerator: bool
) -> Iterator[tuple[Numbers, tuple[ArgumentCondition, ...]]]:
    """Yield the calls that are decided by their arguments, with the conditions."""
    yield (
        (56, 220),
        (ArgumentCondition(0, (_THREAD,), _THREAD | _NAMESPACES),),
    )  # clone: threads, not processes
    # mmap: no limit counts shared memory without a file.
    shared = ArgumentCondition(3, (_SHARED_ANONYMOUS,), _SHARED_ANONYMOUS, wanted=False)
    yield (9, 222), () if accelerator else (shared,)
    yield (234, 131), (ArgumentCondition(0, (pid,)),)  # tgkill: abort() signals itself
    # prlimit64: it may read its own limits, but set none. A privileged process could raise them.
    yield (
        (302, 261),
        (ArgumentCondition(0, (0, pid)), ArgumentCondition(2, (0,)), ArgumentCondition(2, (0,), upper=True)),
    )
    # sendto: only on a connected socket, without an address.
    yield (44, 206), (ArgumentCondition(4, (0,)), ArgumentCondition(4, (0,), upper=True))
    yield (157, 167), (ArgumentCondition(0, _PRCTLS),)
    yield (72, 25), (ArgumentCondition(1, _FCNTLS_REFUSED, wanted=False),)
    yield (16, 29), () if accelerator else (ArgumentCondition(1, _IOCTLS),)
    reading = not files_fenced and not accelerator
    yield (257, 56), (ArgumentCondition(2, (0,), _WRITING),) if reading else ()  # openat
    yield (2, None), (ArgumentCondition(1, (0,), _WRITING),) if reading else ()  # open


def _block(conditions: Sequence[ArgumentCondition]) -> Iterator[tuple[int, int, int, int]]:
    """Yield instructions that allow the call if every condition holds, else refuse it with EPERM. Every path
    ends in a return."""
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    for condition in conditions:
        yield _LOAD, 0, 0, 16 + 8 * condition.argument + (4 if condition.upper else 0)
        yield _AND, 0, 0, condition.mask
        last = len(condition.values) - 1
        for place, value in enumerate(condition.values):
            # A match jumps over the other comparisons: to the refusal, or past it.
            yield (
                _EQUAL,
                last - place + (1 if condition.wanted else 0),
                int(not condition.wanted and place == last),
                value,
            )
        yield refuse
    yield _RETURN, 0, 0, _ALLOW
