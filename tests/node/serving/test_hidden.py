"""Hidden states of a prompt are requested from whole nodes in virtual time."""

import numpy as np
import pytest
import trio

from crypto.identity import PeerId
from node.errors import RunFailed, UsageError
from node.serving.asking import Asking
from node.serving.questions import Question
from partition.serve.messages import OpenSession, Sends, SessionClosed
from partition.serve.provider import SessionProvider
from tests.node.serving.scene import holders, serving, until
from tests.partition.serve.world import VOCABULARY, logits_after
from tests.stack import simulate

PROMPT = tuple(number % VOCABULARY for number in range(500))


class WidthAsking(Asking):
    """Requests hidden states from a service of tokens. Such a service has no graph that gives the width of
    the states, so this class gives it."""

    async def _hidden_width(self, *_: object) -> int:
        return VOCABULARY


def test_hidden_states_are_complete_although_a_node_is_killed() -> None:
    async def main() -> None:
        async with serving("abc") as (group, service), trio.open_nursery() as nursery:
            door, rows = group.nodes["a"], list[np.ndarray]()
            victim = next(name for name in holders(group) if name != "a")

            async def read() -> None:
                rows.append(await WidthAsking(door.serving).hidden("tokens", Question(PROMPT)))

            nursery.start_soon(read)
            await until(lambda: door.serving.generations.door.generations > 0)
            await trio.sleep(0.1)
            group.kill(victim)
            await until(lambda: bool(rows))
            wanted = [logits_after(PROMPT[: end + 1]) for end in range(len(PROMPT))]
            assert np.array_equal(rows[0], np.stack(wanted))
            assert group.nodes["a"].serving.generations.newest[service.id].moves == 1

    simulate(main)


def test_an_empty_or_invalid_prompt_has_no_hidden_states() -> None:
    async def main() -> None:
        async with serving("ab") as (group, _):
            asking = WidthAsking(group.nodes["a"].serving)
            for prompt in ((), (VOCABULARY,), PROMPT * 2):
                with pytest.raises(UsageError, match="prompt"):
                    await asking.hidden("tokens", Question(prompt))

    simulate(main)


def test_a_prompt_that_is_too_long_is_refused_without_a_crash() -> None:
    class RefusingProvider(SessionProvider):
        def receive(self, now: float, door: PeerId, message: object) -> Sends:
            del now
            if not isinstance(message, OpenSession):
                return []
            return [(door, SessionClosed(message.session, "length", "too long"))]

    async def main() -> None:
        async with serving("ab", parts={SessionProvider: RefusingProvider}) as (group, _):
            with pytest.raises(RunFailed, match="without the hidden states"):
                await WidthAsking(group.nodes["a"].serving).hidden("tokens", Question(PROMPT))

    simulate(main)
