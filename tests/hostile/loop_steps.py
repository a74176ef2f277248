"""Measures how long each step of a node's event loop takes, and locates the longest steps in the program.

A step is a task's work between two waits; nothing else happens in the node meanwhile. A step is measured by
the processor time of the loop's own thread, so that a busy machine does not lengthen it. The thread's waits
within the step, for a disk or a lock, are measured separately: the elapsed time, minus the time it computed,
minus the time it was ready while the kernel ran others. A second thread samples the loop's stack at intervals
to locate long steps.
"""

import gc
import os
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec
import trio

LOOK_SECONDS = 0.01
SLOW_SECONDS = 0.02
"""Steps that take at least this long are recorded."""
KEPT_MAX = 20
"""Maximum number of longest steps kept."""
PLACES_MAX = 6
SOURCE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass(frozen=True)
class Step:
    """A step that computed for `cpu_seconds`, of which garbage collection took `garbage_seconds`, and that
    waited for `waited_seconds`.

    `messages` are the messages that the step handled.
    """

    cpu_seconds: float
    garbage_seconds: float
    waited_seconds: float
    task: str
    places: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()

    def __str__(self) -> str:
        about = f" [{', '.join(self.messages)}]" if self.messages else ""
        places = " < ".join(self.places)
        return (
            f"{1e3 * self.cpu_seconds:.0f} ms ({1e3 * self.garbage_seconds:.0f} of them for garbage, and"
            f" {1e3 * self.waited_seconds:.0f} ms waited) in {self.task}{about}: {places}"
        )


class LoopSteps(trio.abc.Instrument):
    """An instrument for `trio.run`.

    Linux reports how long a thread was ready without running; on other systems that time counts as waiting.
    """

    def __init__(self) -> None:
        self.count = 0
        self.longest: list[Step] = []
        self._begun = self._cpu_begun = self._ready_begun = self._garbage_seconds = 0.0
        self._number = 0
        self._seen: tuple[int, tuple[str, ...], tuple[str, ...]] = (0, (), ())
        self._is_stepping = False
        self._over = threading.Event()
        self._thread = threading.get_ident()
        self._file: int | None = None

    def before_run(self) -> None:
        self._thread = threading.get_ident()
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None
        gc.callbacks.append(self._collect)
        threading.Thread(target=self._look, daemon=True).start()

    def after_run(self) -> None:
        self._over.set()
        gc.callbacks.remove(self._collect)

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() == self._thread:
            self._garbage_seconds += time.thread_time() * (1 if phase == "stop" else -1)

    def _ready_seconds(self) -> float:
        """Return how long the thread has been ready without running so far."""
        return 0.0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._number += 1
        self._ready_begun = self._ready_seconds()
        self._garbage_seconds = 0.0
        self._cpu_begun = time.thread_time()
        self._begun = time.perf_counter()
        self._is_stepping = True

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._is_stepping = False
        seconds = time.perf_counter() - self._begun
        self.count += 1
        if seconds < SLOW_SECONDS:
            return
        cpu_seconds = time.thread_time() - self._cpu_begun
        waited_seconds = max(0.0, seconds - cpu_seconds - (self._ready_seconds() - self._ready_begun))
        number, places, messages = self._seen
        seen = (places, messages) if number == self._number else ((), ())
        self.longest.append(Step(cpu_seconds, self._garbage_seconds, waited_seconds, task.name, *seen))
        self.longest.sort(key=lambda step: -step.cpu_seconds)
        del self.longest[KEPT_MAX:]

    def forget(self) -> None:
        """Reset all figures."""
        self.longest.clear()
        self.count = 0

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            number = self._number
            if not self._is_stepping or time.perf_counter() - self._begun < SLOW_SECONDS:
                continue
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                self._seen = (number, *_describe(frame))


def _describe(frame: FrameType | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the functions of this project on the stack, the innermost first, and the messages that they
    hold."""
    places: list[str] = []
    messages: list[str] = []
    while frame is not None and len(places) < PLACES_MAX:
        file = frame.f_code.co_filename
        if file.startswith(SOURCE_ROOT):
            places.append(f"{os.path.relpath(file, SOURCE_ROOT)}:{frame.f_lineno} {frame.f_code.co_name}")
            for name in ("message", "request"):
                value: Any = frame.f_locals.get(name)
                if isinstance(value, msgspec.Struct) and type(value).__name__ not in messages:
                    messages.append(type(value).__name__)
        frame = frame.f_back
    return tuple(places), tuple(messages)
