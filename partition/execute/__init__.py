"""Computation of a stage: the executor and its parts. It imports torch, and runs in the process of a
stage."""

from partition.execute.executor import StageExecutor
from partition.execute.process import (
    defer_compiler,
    keep_freed_memory,
    load_late_modules,
    prepare_process,
    release_memory,
    set_threads,
)

__all__ = [
    "StageExecutor",
    "defer_compiler",
    "keep_freed_memory",
    "load_late_modules",
    "prepare_process",
    "release_memory",
    "set_threads",
]
