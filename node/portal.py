"""Runs a trio event loop in its own thread, and calls into it from other threads.

It knows nothing of nodes. Calls work from plain scripts, from threads and from a notebook, even if asyncio
runs in the calling thread, since nothing is awaited there. Unlike with `trio.from_thread`, a call interrupted
by Ctrl-C is also cancelled in the loop, and a call into a loop that has ended raises immediately instead of
waiting.
"""

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import trio

from node.errors import PeerloomError
from node.forks import refuse_in_child

T = TypeVar("T")
S = TypeVar("S")

THREAD_NAME = "peerloom"
JOIN_SECONDS_MAX = 30.0
"""How long `close` waits for the loop to end. A node takes up to 8 s to hand over and one to leave."""


class PortalClosed(PeerloomError):
    """The event loop behind a blocking call has ended."""


@dataclass(frozen=True, eq=False)
class LoopCall(Generic[T]):
    """One call into the loop: its function, and the future for its outcome."""

    function: Callable[..., Awaitable[T]]
    arguments: tuple[Any, ...]
    future: Future[T] = field(default_factory=Future)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Portal(Generic[S]):
    """Runs `async with make() as subject` in its own thread until `close`.

    `open` returns once the subject has been entered, and raises any error of entering it.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[S]]) -> None:
        self._make = make
        self._started: Future[S] = Future()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._closing: trio.Event | None = None
        self._failure: BaseException | None = None
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._is_over = False
        self._process = os.getpid()

    def open(self) -> S:
        """Start the thread; return the subject once it has been entered."""
        self._thread.start()
        return self._started.result()

    @property
    def subject(self) -> S:
        """The value that `open` returned."""
        return self._started.result()

    @property
    def is_open(self) -> bool:
        """Whether the loop accepts calls."""
        return self._started.done() and not self._is_over

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the portal, and not a forked child."""
        return os.getpid() == self._process

    def refuse_in_child(self) -> None:
        """Raise ForkedChild if this is a forked child, which has no loop."""
        refuse_in_child(self._process)

    def close(self) -> None:
        """Leave the subject's context and end the thread. May be repeated; in a forked child it does nothing.
        Raises the error that ended the loop."""
        if self._thread.ident is None or not self.is_here:
            return
        with self._lock:
            if not self._is_over and self._token is not None and self._closing is not None:
                self._token.run_sync_soon(self._closing.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS_MAX)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def run(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run a coroutine function in the loop; return its result or raise its error.

        If Ctrl-C interrupts the calling thread, the call is also cancelled in the loop. Raises PortalClosed
        or ForkedChild.
        """
        call = self.begin(function, *arguments)
        try:
            return call.future.result()
        except CancelledError:
            raise PortalClosed("the node ended before it had answered") from None
        except KeyboardInterrupt:
            self.cancel(call)
            raise

    def call_sync(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a plain function in the loop's thread. Raises PortalClosed."""

        async def run() -> T:
            return function(*arguments)

        return self.run(run)

    def begin(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> "LoopCall[T]":
        """Start a coroutine function in the loop without waiting. Raises PortalClosed or ForkedChild."""
        self.refuse_in_child()
        if threading.current_thread() is self._thread:
            raise PortalClosed("a blocking call from inside the node's own event loop would never return")
        call = LoopCall(function, arguments)
        with self._lock:
            if self._is_over or self._token is None:
                raise PortalClosed("the node has ended", "open another one: with node.sync(...) as me")
            self._pending.add(call.future)
            self._token.run_sync_soon(self._begin, call)
        return call

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run a plain function in the loop's thread soon, after all functions posted before it (tasks of
        `begin` may run in any order). The function must not raise. Raises PortalClosed or ForkedChild."""
        self.refuse_in_child()
        with self._lock:
            if self._is_over or self._token is None:
                raise PortalClosed("the node has ended", "open another one: with node.sync(...) as me")
            self._token.run_sync_soon(function, *arguments)

    def cancel(self, call: "LoopCall[Any]") -> None:
        """Cancel a call started by `begin`, if it is still running.

        Raises ForkedChild.
        """
        self.refuse_in_child()
        with self._lock:
            if not self._is_over and self._token is not None:
                self._token.run_sync_soon(call.scope.cancel)

    def iterate(self, make: Callable[..., AsyncIterator[T]], *arguments: Any) -> Iterator[T]:
        """Yield an async iterator's items until it or the loop ends. Closing this generator closes the async
        iterator."""
        iterator = make(*arguments)

        async def close() -> None:
            await iterator.aclose()  # type: ignore[attr-defined]  # a generator, as all public ones are

        try:
            while True:
                try:
                    yield self.run(iterator.__anext__)
                except (StopAsyncIteration, PortalClosed):
                    return
        finally:
            if self.is_open and self.is_here:
                self.run(close)

    # In the loop's thread

    def _run(self) -> None:
        try:
            trio.run(self._serve, restrict_keyboard_interrupt_to_checkpoints=True)
        except BaseException as error:
            found = _single(error)
            if self._started.done():
                self._failure = found
            else:
                self._started.set_exception(found)
        finally:
            self._end()

    async def _serve(self) -> None:
        self._closing = trio.Event()
        async with self._make() as subject, trio.open_nursery() as nursery:
            self._nursery = nursery
            self._token = trio.lowlevel.current_trio_token()
            self._started.set_result(subject)
            await self._closing.wait()
            with self._lock:
                self._is_over = True
            nursery.cancel_scope.cancel()

    def _begin(self, call: "LoopCall[Any]") -> None:
        if self._nursery is None or self._is_over:
            self._settle(call.future)
        else:
            self._nursery.start_soon(self._answer, call)

    async def _answer(self, call: "LoopCall[Any]") -> None:
        with call.scope:
            try:
                result = await call.function(*call.arguments)
            except Exception as error:
                self._forget(call.future)
                call.future.set_exception(error)
                return
            except BaseException:  # cancelled, or the loop ends
                self._settle(call.future)
                raise
            self._forget(call.future)
            call.future.set_result(result)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _settle(self, future: Future[Any]) -> None:
        """Settle a call that will never be answered."""
        self._forget(future)
        if future.cancel():
            future.set_running_or_notify_cancel()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            left = list(self._pending)
        for future in left:
            self._settle(future)


def _single(error: BaseException) -> BaseException:
    """Return the only exception of a nested group, because people should not see a nursery's wrapping."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
