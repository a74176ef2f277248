"""The library has one set of methods, in an async and in a blocking form."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import trio

import node
from crypto.contact import parse_address
from crypto.facts import IdentitySigner
from crypto.identity import Identity
from node import config
from node.api.surface import Surface
from node.cli.client import ask
from node.errors import JoinTimeout, UsageError
from node.events import MemberJoined, NodeStarted
from node.library import generate
from node.library.blocking import BlockingSurface
from node.library.sync import SyncNode
from node.portal import Portal, PortalClosed
from node.protocols.followed import SettingsBody, SharedSetting, file_of, sign_settings
from node.services.broadcasts import Broadcast


def settings(folder: Path, name: str) -> config.Config:
    return config.Config(
        name=name,
        data_dir=folder / name,
        swarm=config.SwarmSettings(name="library", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False),
        resources=config.Resources(calibrate=False),
    )


@pytest.fixture
def open_node(tmp_path: Path) -> Callable[..., SyncNode]:
    def make(name: str, join: tuple[str, ...] = ()) -> SyncNode:
        base = settings(tmp_path, name)
        seeds = tuple(parse_address(text) for text in join)
        return node.sync(replace(base, join=config.JoinSettings(lan=False, seeds=seeds)))

    return make


def test_the_blocking_form_is_generated_from_the_async_one() -> None:
    written = (Path(generate.__file__).parent / "blocking.py").read_text(encoding="utf-8")
    assert generate.generate() == written, (
        "node.library.sync is out of date: run python -m node.library.generate"
    )


def test_both_forms_have_equal_methods_and_types() -> None:
    public = [name for name in vars(Surface) if not name.startswith("_")]
    assert public == [name for name in vars(BlockingSurface) if not name.startswith("_")]
    for name in public:
        asynchronous, blocking = vars(Surface)[name], vars(BlockingSurface)[name]
        assert isinstance(asynchronous, property) == isinstance(blocking, property)
        if isinstance(asynchronous, property):
            asynchronous, blocking = asynchronous.fget, blocking.fget
        parameters = [list(inspect.signature(each).parameters) for each in (asynchronous, blocking)]
        assert parameters[0] == parameters[1]
        hints, others = get_type_hints(asynchronous), get_type_hints(blocking)
        assert hints.keys() == others.keys()
        assert not inspect.iscoroutinefunction(blocking)


def test_two_nodes_meet_and_a_script_lists_members(open_node: Callable[..., SyncNode]) -> None:
    with open_node("a") as a, open_node("b", (a.addresses[0],)) as b:
        b.wait_for_members(1)
        assert [member.name for member in b.members()] == ["a"]
        assert b.status()["name"] == "b"
        assert (a.id, b.id) == (a.status()["peer"], b.status()["peer"])
        a.wait_for_members(1)


def test_a_node_in_a_program_applies_the_settings_that_it_follows(tmp_path: Path) -> None:
    owner = IdentitySigner(Identity(bytes([1]) * 32), "library")
    asked = replace(settings(tmp_path, "a"), follow=config.Follow(owner.peer))
    body = SettingsBody(2, "fleet", (SharedSetting("hours", "22:00-07:00"),))
    with node.sync(asked):
        document = file_of(sign_settings(owner, body), 2).decode()
        assert ask(asked.data_dir, "config.publish", {"document": document})["version"] == 2
    with node.sync(asked) as again:
        assert again.status()["follow"]["settings"] == ["hours = 22:00-07:00"]


def test_a_later_join_returns_the_outcome_for_each_address(open_node: Callable[..., SyncNode]) -> None:
    with open_node("a") as a, open_node("b") as b:
        tried = b.join([a.addresses[0], b.addresses[0]])
        assert [each.outcome for each in tried] == ["ok", "self"]
        b.wait_for_members(1)
        with pytest.raises(UsageError):
            b.join(["10.0.0.5:99999"])


def test_an_event_stream_starts_with_past_events_and_ends_with_its_node(
    open_node: Callable[..., SyncNode],
) -> None:
    seen: list[object] = []
    with open_node("a") as a:
        first = next(a.events(0.0, (NodeStarted,)))
        assert isinstance(first, NodeStarted)
        assert first.name == "a"

        def follow() -> None:
            seen.extend(a.events(0.0, (MemberJoined,)))

        thread = threading.Thread(target=follow)
        thread.start()
        with open_node("b", (a.addresses[0],)):
            a.wait_for_members(1)
    thread.join(10)
    assert [type(event) for event in seen] == [MemberJoined]
    assert not thread.is_alive(), "the thread still waits for events after its node has ended"


def test_a_broadcast_reaches_other_programs_until_their_node_closes(
    open_node: Callable[..., SyncNode],
) -> None:
    heard: list[Broadcast] = []
    with open_node("a") as a:
        with open_node("b", (a.addresses[0],)) as b:

            def follow() -> None:
                heard.extend(b.broadcasts("price"))

            b.wait_for_members(1)
            thread = threading.Thread(target=follow)
            thread.start()
            first = b.broadcasts()
            waiting = threading.Thread(target=lambda: heard.append(next(first)))
            waiting.start()
            for count in range(200):  # the listener may start late
                a.broadcast("price", b"%d" % count)
                waiting.join(0.05)
                if not waiting.is_alive() and len(heard) > 1:
                    break
            with pytest.raises(UsageError, match="512"):
                a.broadcast("price", bytes(513))
            with pytest.raises(UsageError, match="topic"):
                a.broadcast("", b"")
        thread.join(10)
        assert not thread.is_alive(), "the thread still waits for broadcasts after its node has ended"
        assert {(told.peer, told.topic) for told in heard} == {(a.id, "price")}


def test_waiting_for_too_few_members_fails_with_the_number_found(open_node: Callable[..., SyncNode]) -> None:
    with open_node("a") as a, pytest.raises(JoinTimeout, match="0 of 1"):
        a.wait_for_members(1, 0.05)


def test_the_blocking_form_works_while_asyncio_runs_in_the_same_thread(
    open_node: Callable[..., SyncNode],
) -> None:
    async def cell() -> int:  # as in a cell of a notebook
        with open_node("a") as a:
            return len(a.members())

    assert asyncio.run(cell()) == 0


def test_calls_on_a_closed_node_raise_immediately(open_node: Callable[..., SyncNode]) -> None:
    me = open_node("a").open()
    me.close()
    me.close()
    with pytest.raises(PortalClosed):
        me.members()


def test_both_forms_of_a_node_take_the_same_parameters() -> None:
    blocking, asynchronous = (inspect.signature(each).parameters for each in (node.sync, node.Node))
    assert blocking.items() <= asynchronous.items()


async def test_a_node_under_trio_accepts_a_name_a_folder_and_a_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEERLOOM_CALIBRATE", "false")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    options: dict[str, Any] = {"listen": ["127.0.0.1:0"], "lan": False, "swarm": "forms"}
    record = tmp_path / "a.record"
    async with node.Node(name="a", data_dir=tmp_path / "a", record=record, **options) as me:
        assert (me.status()["name"], me.status()["swarm"]) == ("a", "forms")
        assert me.config.data_dir == tmp_path / "a"
        async with node.Node(**options) as one:
            folders = [each.config.data_dir for each in (one, node.Node(**options))]
            assert folders == [tmp_path / "peerloom" / "scripts" / number for number in "12"]
    assert record.stat().st_size > 0


@pytest.mark.parametrize("form", [node.sync, node.Node])
def test_an_argument_in_addition_to_a_config_is_refused(form: Callable[..., object], tmp_path: Path) -> None:
    for key, value in {"name": "a", "data_dir": tmp_path, "listen": ["127.0.0.1:0"], "lan": False}.items():
        with pytest.raises(UsageError, match=f"{key}= has no effect together with config="):
            form(settings(tmp_path, "a"), **{key: value})


def test_scripts_of_one_user_get_separate_data_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("PEERLOOM_DATA_DIR", raising=False)
    options = {"listen": ["127.0.0.1:0"], "lan": False, "swarm": "scripts"}
    with node.sync(**options) as a, node.sync(**options) as b:  # type: ignore[arg-type]  # of several types
        folders = [Path(each.status()["data_dir"]) for each in (a, b)]
        first = a.id
    assert folders == [tmp_path / "peerloom" / "scripts" / number for number in "12"]
    with node.sync(**options) as again:  # type: ignore[arg-type]  # of several types
        assert again.id == first


def test_an_error_at_a_nodes_start_is_raised_by_open(
    open_node: Callable[..., SyncNode],
) -> None:
    with open_node("a"), pytest.raises(UsageError, match="already runs"):
        open_node("a").open()


class Loop:
    """An object for the portal to run that is not a node."""

    async def __aenter__(self) -> "Loop":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await trio.lowlevel.checkpoint()

    async def forever(self) -> None:
        await trio.sleep_forever()

    async def fail(self) -> None:
        raise ValueError("as asked")

    async def count(self, end: int) -> AsyncIterator[int]:
        for number in range(end):
            await trio.lowlevel.checkpoint()
            yield number


def test_a_waiting_call_ends_with_its_loop() -> None:
    portal = Portal(Loop)
    loop = portal.open()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            portal.run(loop.forever)
        except PortalClosed as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    portal.close()
    thread.join(60)
    assert len(caught) == 1


def test_a_call_raises_the_loops_error_and_the_loop_continues() -> None:
    portal = Portal(Loop)
    loop = portal.open()
    with pytest.raises(ValueError, match="as asked"):
        portal.run(loop.fail)
    assert list(portal.iterate(loop.count, 3)) == [0, 1, 2]
    with pytest.raises(PortalClosed, match="inside"):
        portal.run(_call_back, portal, loop)
    portal.close()


def test_posted_calls_run_in_order_until_the_loop_ends() -> None:
    portal = Portal(Loop)
    portal.open()
    done: list[int] = []
    for number in range(200):
        portal.post(done.append, number)
    portal.call_sync(int)
    assert done == list(range(200))
    portal.close()
    with pytest.raises(PortalClosed):
        portal.post(done.append, 200)


async def _call_back(portal: Portal[Loop], loop: Loop) -> None:
    portal.run(loop.fail)
