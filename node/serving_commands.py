"""Handles the commands about services on the control channel: `serve`, `generate`, `services`."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from node.control import CommandHandler, Emit
from node.requests import Given, Nothing, command
from node.serving.asking import Asking, ServeWish
from node.serving.questions import Question
from node.serving.serving import Serving


class ServeRequest(Struct, frozen=True):
    """Serve a captured model (a file), or a run's weights (its id)."""

    model: Given
    wish: ServeWish = ServeWish()


class ServiceRequest(Struct, frozen=True):
    """A service, by its name or id."""

    service: Given


class GenerateRequest(ServiceRequest, frozen=True):
    """Send a question to a service."""

    question: Question = Question()


class ServingCommands:
    """The handlers of the service commands, by command name."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._asking = Asking(serving)

    @property
    def handlers(self) -> Mapping[str, CommandHandler]:
        """Handlers for `node.control.ControlServer`."""
        return {
            "serve": command(ServeRequest, self._serve),
            "services": command(Nothing, self._services),
            "services.stop": command(ServiceRequest, self._stop),
            "services.text": command(ServiceRequest, self._text),
            "generate": command(GenerateRequest, self._generate),
        }

    async def _serve(self, request: ServeRequest, _emit: Emit) -> dict[str, Any]:
        return await self._asking.serve(request.model, request.wish)

    async def _services(self, _request: Nothing, _emit: Emit) -> dict[str, Any]:
        return await self._asking.services()

    async def _stop(self, request: ServiceRequest, _emit: Emit) -> dict[str, Any]:
        return await self._asking.stop(request.service)

    async def _text(self, request: ServiceRequest, _emit: Emit) -> dict[str, Any]:
        return await self._asking.text_document(request.service)

    async def _generate(self, request: GenerateRequest, emit: Emit) -> dict[str, Any]:
        """Emit each piece as it arrives. If the client hangs up, every stage ends the answer."""
        async with self._asking.answering(request.service, request.question) as answer:
            if notice := await self._asking.first_use():
                await emit({"notice": notice})
            async for piece in answer:
                await emit({"piece": piece})
            return answer.document(self._serving.seams.clock.monotonic())
