"""The commands about services, over the control channel: `serve`, `generate`, `services`."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from node.errors import UsageError
from node.serving.asking import Asking, read_serve_wish
from node.serving.questions import read_question
from node.serving.serving import Serving

Emit = Callable[[object], Awaitable[None]]
Handler = Callable[[dict[str, Any], Emit], Awaitable[object]]


class ServingCommands:
    """The handlers, by command name."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._asking = Asking(serving)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """For `node.control.ControlServer`."""
        return {
            "serve": self._serve,
            "services": self._services,
            "services.stop": self._stop,
            "services.text": self._text,
            "generate": self._generate,
        }

    async def _serve(self, arguments: dict[str, Any], _emit: Emit) -> dict[str, Any]:
        wish = read_serve_wish(arguments.get("wish") or {})
        return await self._asking.serve(_text(arguments, "model"), wish)

    async def _services(self, _arguments: dict[str, Any], _emit: Emit) -> dict[str, Any]:
        return await self._asking.services()

    async def _stop(self, arguments: dict[str, Any], _emit: Emit) -> dict[str, Any]:
        return await self._asking.stop(_text(arguments, "service"))

    async def _text(self, arguments: dict[str, Any], _emit: Emit) -> dict[str, Any]:
        return await self._asking.text_document(_text(arguments, "service"))

    async def _generate(self, arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
        """Emit each piece as it comes; a client that hangs up ends the answer in every stage."""
        question = read_question(arguments.get("question") or {})
        async with self._asking.answering(_text(arguments, "service"), question) as answer:
            if notice := await self._asking.first_use():
                await emit({"notice": notice})
            async for piece in answer:
                await emit({"piece": piece})
            return answer.document(self._serving.seams.clock.monotonic())


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise UsageError(f"{name}: want a text")
    return value
