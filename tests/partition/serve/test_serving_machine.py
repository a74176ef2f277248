"""Generations over providers that die, hang up and return. Every text equals that of an undisturbed
generation."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from partition.serve.prefixes import REST_SECONDS_MAX
from partition.serve.provider import SESSIONS_PER_DOOR_MAX
from partition.serve.session_places import SESSIONS_MAX
from tests.partition.serve.world import DOORS, PROVIDERS, World, reference, wish

PLACES = [(stage, peer) for stage, peers in PROVIDERS.items() for peer in peers]


class ServingMachine(RuleBasedStateMachine):
    """Rules are actions of users, machines and networks; finally `settle` lets everything else happen."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.wishes: dict[tuple[object, int], object] = {}
        self.cancelled: set[tuple[object, int]] = set()

    @rule(
        door=st.sampled_from(DOORS),
        prompt=st.integers(1, 300),
        tokens=st.integers(1, 6),
        seed=st.integers(0, 6),
        other=st.integers(0, 2),
        temperature=st.sampled_from([0.0, 0.8]),
        top_k=st.sampled_from([0, 3]),
    )
    def begin(
        self,
        door: object,
        prompt: int,
        tokens: int,
        seed: int,
        other: int,
        temperature: float,
        top_k: int,
    ) -> None:
        # Prompts of one seed start with the same tokens; some continue with another prompt's tokens.
        wanted = wish(prompt, tokens, seed=seed, temperature=temperature, top_k=top_k)
        tail = wish(prompt, seed=100 + other).prompt[: 40 * other]
        wanted = replace(wanted, prompt=wanted.prompt + tail, owner=str(seed % 2))
        key = self.world.begin(door, wanted)  # type: ignore[arg-type]  # a peer
        self.wishes[key] = wanted

    @rule(steps=st.integers(1, 40))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(place=st.sampled_from(PLACES), breaks=st.booleans())
    def kill(self, place: tuple[int, object], breaks: bool) -> None:
        if place[1] in self.world.providers:
            self.world.kill(place[1], breaks=breaks)  # type: ignore[arg-type]  # a peer

    @rule(place=st.sampled_from(PLACES))
    def start(self, place: tuple[int, object]) -> None:
        if place[1] not in self.world.providers:
            self.world.start(*place)  # type: ignore[arg-type]  # a peer

    @rule(place=st.sampled_from(PLACES))
    def double_up(self, place: tuple[int, object]) -> None:
        stage, peer = place
        if peer in self.world.providers and (peer, 1 - stage) not in self.world.stopgaps:
            self.world.double_up(peer, 1 - stage)  # type: ignore[arg-type]  # a peer

    @rule(place=st.sampled_from(PLACES))
    def relieve(self, place: tuple[int, object]) -> None:
        stage, peer = place
        if (peer, 1 - stage) in self.world.stopgaps:
            self.world.relieve(peer, 1 - stage)  # type: ignore[arg-type]  # a peer

    @rule(seconds=st.floats(0.05, 2))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        going = [key for key in self.wishes if key not in self.world.finished]
        if going:
            key = data.draw(st.sampled_from(going))
            self.cancelled.add(key)
            self.world.put(key[0], self.world.doors[key[0]].cancel(self.world.now, key[1]))  # type: ignore[arg-type, index]  # by how it was made
            self.world.drain()

    @invariant()
    def bounded(self) -> None:
        for provider in self.world.providers.values():
            assert provider.sessions <= min(SESSIONS_MAX, SESSIONS_PER_DOOR_MAX * len(DOORS))

    @invariant()
    def nothing_wrong_was_said(self) -> None:
        assert not self.world.misbehaved
        for key, tokens in self.world.tokens.items():
            wanted = reference(self.wishes[key])  # type: ignore[arg-type]  # a wish
            assert tokens == wanted[: len(tokens)]

    def teardown(self) -> None:
        world = self.world
        for stage, peer in PLACES:
            if peer not in world.providers:
                world.start(stage, peer)
        world.settle()
        for key, wanted in self.wishes.items():
            end = world.finished[key]  # type: ignore[index]  # by how it was made
            if key in self.cancelled and end.reason == "cancelled":
                continue
            assert end.reason == "length", end
            assert world.tokens[key] == reference(wanted)  # type: ignore[index, arg-type]  # by how it was made
        # The last messages arrive, and resting sessions are released. After that no stage keeps any session.
        for _ in range(int((REST_SECONDS_MAX + 15) / 0.5)):
            world.pass_time(0.5)
            while world.step():
                pass
        assert not any(provider.sessions for provider in world.providers.values())
        assert not any(stage.kept for stage in (*world.stages.values(), *world.stopgaps.values()))


ServingMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestServing = ServingMachine.TestCase
