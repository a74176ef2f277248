"""Run a program as on a kernel without Landlock: `python -m tests.node.without_landlock PROGRAM
ARGUMENTS...`.

For the program and its children, a seccomp filter answers the first Landlock call as such a kernel does.
"""

import ctypes
import errno
import os
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_CREATE_RULESET = 444
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER_OFFSET = 0


def _forbid() -> None:
    rows = (
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_IF_EQUAL, 0, 1, _CREATE_RULESET),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_RETURN, 0, 0, _ALLOW),
    )
    filtered = b"".join(struct.pack("=HBBI", *row) for row in rows)
    program = ctypes.create_string_buffer(filtered, len(filtered))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(rows), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0)):
        wide = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments[1:]]
        if libc.prctl(arguments[0], *wide):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    _forbid()
    os.execvp(sys.argv[1], sys.argv[1:])
