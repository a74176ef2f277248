"""Every view of the page in a real browser: on five real nodes that train and lose one, and on a thousand
members."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from node.cli.client import ask, request
from node.demo.processes import SwarmProcesses
from node.demo.scenario import run_text
from tests.browser import opened, require
from tests.node.web.world import Told, joined, run_events, served, started
from tests.source import ROOT

VIEWS = ("/", "/run", "/plan", "/models", "/chat", "/node", "/events")
OUT = ROOT / "demo-out"
STEPS = 2_000


# Playwright leaves pipes of its driver to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def training(tmp_path: Path) -> Iterator[SwarmProcesses]:
    """Yield five nodes; the page is node d's."""
    require()
    swarm = SwarmProcesses(tmp_path, "browser", time.sleep, with_page="d", calibrate=False)
    try:
        swarm.launch("abcde")
        before = None
        for name in "abcde":
            before = swarm.start(name, before).address
        yield swarm
    finally:
        swarm.close()


def test_every_view_shows_a_running_swarm_with_a_death(training: SwarmProcesses) -> None:
    with opened(viewport={"width": 1280, "height": 1000}) as page:
        address = training.status("d")["page"]
        OUT.mkdir(exist_ok=True)
        page.goto(f"{address}/run")
        page.wait_for_selector("text=Open this page with")
        page.goto(ask(training.nodes["d"].data_dir, "page")["link"])
        page.wait_for_selector("h1:has-text('Swarm')")
        page.click("nav >> text=Run")
        page.fill("textarea", run_text(Path("RUN.toml"), STEPS))
        page.click("text=Start the run")
        page.wait_for_function("document.querySelectorAll('.chart canvas').length >= 3", timeout=120_000)
        plan = training.status("d")["runs"][0]["plan"]
        names = {node.peer: node.name for node in training.nodes.values()}
        victim = next(
            names[peer] for stage in plan["stages"] for peer in stage["replicas"] if names[peer] not in "de"
        )
        training.kill(victim)
        lost_at = event_time(training, "MemberLost")
        page.wait_for_selector("td span.bad:text-is('death')", timeout=30_000)
        assert time.time() - lost_at <= 2.0 + LOOK_SECONDS
        for path in VIEWS:
            page.goto(address + path)
            page.wait_for_selector("h1")
            page.wait_for_function("!document.body.textContent.includes('Loading')")
            page.screenshot(path=str(OUT / f"page{path.replace('/', '-')}.png"), full_page=True)
            assert faults(page) == [], path
        page.goto(f"{address}/plan")
        page.click("fieldset label >> nth=0")
        page.wait_for_selector("h2:has-text('A new plan')", timeout=60_000)
        page.screenshot(path=str(OUT / "page-plan-without.png"), full_page=True)
        page.goto(f"{address}/")
        page.wait_for_selector("span.dead")
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            assert faults(page) == [], scheme
        assert page.complaints == []


LOOK_SECONDS = 0.6
"""Seconds allowed between a death's event and the time when this test learns of it, on a busy machine."""


def event_time(training: SwarmProcesses, kind: str) -> float:
    """Return the time of d's next event of this kind."""
    for reply in request(training.nodes["d"].data_dir, "events", {"since": 0.0, "kinds": [kind]}):
        if "event" in reply:
            return float(reply["event"]["at_seconds"])
    raise AssertionError("the node closed the connection")


def faults(page: Any) -> list[str]:
    """Return serious accessibility errors found by axe-core, if PEERLOOM_AXE names its file; otherwise
    none."""
    path = os.environ.get("PEERLOOM_AXE")
    if not path:
        return []
    page.evaluate(Path(path).read_text())
    found = page.evaluate("axe.run()")
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:120]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("width", [320, 1280])
def test_a_thousand_members_appear_soon_and_narrow_screens_do_not_scroll(width: int) -> None:
    with opened(viewport={"width": width, "height": 800}) as page, page_of_a_thousand() as address:
        page.goto(address)
        page.wait_for_selector("h1")
        page.wait_for_function("document.querySelectorAll('tbody tr').length >= 100")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator("text=100 of").count() == 0
        page.fill("input[type=search]", "n777")
        page.wait_for_function("document.querySelectorAll('tbody tr').length === 1")
        assert page.complaints == []


def test_the_page_reports_a_stopped_node_and_works_by_keyboard() -> None:
    with opened() as page:
        with page_of_a_thousand() as address:
            page.goto(address)
            page.wait_for_selector("h1")
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.textContent") == "Skip to content"
            page.keyboard.press("Tab")
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.textContent") == "Run"
            page.keyboard.press("Enter")
            page.wait_for_selector("h1:has-text('Run cnn')")
        page.wait_for_selector("text=link lost")


@contextlib.contextmanager
def page_of_a_thousand() -> Iterator[str]:
    """Return the address of a page that shows a thousand members in five regions, served by a thread."""
    node = Told()
    for event in [
        started(),
        *(joined(n, location=f"region-{n % 5}") for n in range(1, 1_001)),
        *run_events(),
    ]:
        node.publish(event)
    ready, end = threading.Event(), trio.Event()
    held: list[Any] = []

    async def serve() -> None:
        async with served(node) as page:
            held.extend((page.page.link, trio.lowlevel.current_trio_token()))
            ready.set()
            await end.wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(20)
    try:
        yield held[0]
    finally:
        held[1].run_sync_soon(end.set)
        thread.join()
