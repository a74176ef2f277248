"""The page's chat in a real browser: with an invented model, and with real nodes of which one dies during an
answer."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.cli.client import ask
from node.demo.processes import SwarmProcesses
from node.main import run
from tests.browser import opened, require
from tests.node.web.chat_world import page_of_chats
from tests.node.web.models_world import ANSWER
from tests.test_browser import OUT, faults
from tests.test_serving_text_processes import make_folder

# Playwright leaves pipes of its driver to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
NAMES = "abcde"
"""The last node serves the page, and has no slot."""
CONTEXT = 4_096
TOKENS = 400
CODE = "So:\n\n```\nx = 1\n```\nThat is it."
QUESTION = "What does an assignment statement evaluate?"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[SwarmProcesses]:
    """Yield five nodes, four of which hold two stages, each twice, of a model that chats."""
    require()
    (tmp_path / "nodes").mkdir()
    swarm = SwarmProcesses(tmp_path / "nodes", "chat", time.sleep, with_page="e", calibrate=False)
    try:
        swarm.launch(NAMES[:-1])
        swarm.launch(NAMES[-1], {"PEERLOOM_ACCEPT_RUNS": "never"})
        make_folder(tmp_path / "tiny", CONTEXT)
        first = swarm.start("a", None)
        for name in NAMES[1:]:
            swarm.start(name, first.address, ["--log", "json"])
        yield swarm
    finally:
        swarm.close()


def test_a_conversation_works_by_keyboard_on_a_narrow_screen() -> None:
    with opened(viewport={"width": 320, "height": 800}) as page, page_of_chats(seconds=0.01) as (link, said):
        page.goto(link)
        page.click("nav >> text=Chat")
        page.focus("textarea")
        page.keyboard.type("hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("there")
        page.keyboard.press("Enter")
        page.wait_for_selector(f".theirs .text:has-text('{ANSWER[:5]}')")
        page.keyboard.press("Escape")
        page.wait_for_selector("text=Stopped.")
        assert said.going == 0
        assert bytes(said.wishes[0].prompt) == b"user: hello\nthere"
        assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
        # The received part stays in the conversation; the repeated question gets a separate answer.
        said.breaks_after = 3
        page.click("button:text-is('Regenerate')")
        page.wait_for_selector(".line.bad:has-text('the answer broke off')")
        assert page.text_content(".theirs .text") == "Gr"
        said.breaks_after, said.moves_after, said.seconds = None, 6, 0.0
        page.click("button:text-is('Try again')")
        page.wait_for_selector(".line.warn:has-text('n2 lost (its stream broke); n3 took over after')")
        page.wait_for_selector(".theirs:has-text('512 tokens')")
        said.moves_after = -1
        page.fill("textarea", "and?")
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelectorAll('.theirs:has(.line)').length === 2")
        page.wait_for_selector("button:text-is('Send')")
        prompt = bytes(said.wishes[-1].prompt).decode()
        assert prompt.startswith("user: hello\nthere\nassistant: Grüße, 世界! ")
        assert prompt.endswith("\nuser: and?")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        chain = "document.querySelector('.chain').parentElement"
        assert page.evaluate(f"{chain}.scrollWidth <= {chain}.clientWidth"), "a stage lies outside the screen"
        said.says = CODE.encode()
        page.click("button:text-is('Regenerate')")
        page.wait_for_function(f"document.querySelector('li:last-child .text').textContent === {CODE!r}")
        code = page.evaluate("[...document.querySelectorAll('.block')].map((each) => each.textContent)")
        assert code == ["```\nx = 1\n```\n"]
        assert faults(page) == []
        assert not is_kept(page)
        page.click("summary")
        page.check("input[type=checkbox]")
        assert is_kept(page)
        page.reload()
        page.wait_for_selector(".mine:has-text('and?')")
        page.click("summary")
        page.uncheck("input[type=checkbox]")
        assert not is_kept(page)
        page.click("button:text-is('New conversation')")
        page.wait_for_function("!document.querySelector('.talk li')")
        said.holders = {0: [1]}
        page.wait_for_selector("text=No peer holds stage 2 of words")
        assert page.is_disabled("textarea")
        assert page.complaints == []


def is_kept(page: Any) -> bool:
    """Return whether a word of the conversation is in the browser's storage."""
    return "hello" in page.evaluate("JSON.stringify({ ...localStorage, ...sessionStorage })")


@pytest.mark.slow
def test_a_chat_on_the_page_survives_the_death_of_a_stage(serving: SwarmProcesses, tmp_path: Path) -> None:
    OUT.mkdir(exist_ok=True)
    with opened(viewport={"width": 1100, "height": 1000}) as page:
        page.goto(serving.page("e"))
        page.click("nav >> text=Chat")
        page.wait_for_selector("text=No model is served in this swarm yet")
        page.screenshot(path=str(OUT / "chat-empty.png"), full_page=True)
        assert faults(page) == []
        serve = ["serve", str(tmp_path / "tiny"), "--stages", "2", "--replicas", "2"]
        assert run([*serve, "--context", str(CONTEXT), "--data-dir", str(tmp_path / "nodes/a")]) == 0
        page.wait_for_function("document.querySelectorAll('.strip .stage li').length === 4", timeout=60_000)
        expected = asked(serving, TOKENS)
        page.click("summary")
        page.fill("input[max='100000']", str(TOKENS))
        page.fill("textarea", QUESTION)
        page.keyboard.press("Enter")
        page.wait_for_selector(".strip .on")
        page.wait_for_function("document.querySelector('.theirs .text').textContent.length > 40")
        page.screenshot(path=str(OUT / "chat-streaming.png"), full_page=True)
        assert faults(page) == []
        names = {node.peer[-12:]: node.name for node in serving.nodes.values()}
        route = page.evaluate("[...document.querySelectorAll('.strip .on')].map((each) => each.textContent)")
        victim = next(name for name in names.values() if route[1].strip().startswith(name))
        before = page.text_content(".theirs .text")
        serving.kill(victim)
        page.wait_for_selector(f".line.warn:has-text('{victim} lost')", timeout=30_000)
        page.wait_for_selector(f".line.warn:has-text('{victim} lost'):has-text('took over after')")
        page.screenshot(path=str(OUT / "chat-death.png"), full_page=True)
        page.wait_for_selector(f".theirs:has-text('{TOKENS} tokens')", timeout=180_000)
        page.wait_for_selector("button:text-is('Send')")
        said = page.text_content(".theirs .text")
        assert said.startswith(before)
        assert said == expected
        page.screenshot(path=str(OUT / "chat-over.png"), full_page=True)
        for width, scheme in ((1100, "dark"), (320, "light")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=str(OUT / f"chat-{width}-{scheme}.png"), full_page=True)
            assert faults(page) == [], scheme
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints == []


def asked(serving: SwarmProcesses, tokens: int) -> str:
    """Return the answer of the undisturbed service."""
    pieces: list[str] = []
    question = {"messages": [{"role": "user", "content": QUESTION}], "tokens_max": tokens}
    ask(
        serving.folder / "e",
        "generate",
        {"service": "tiny", "question": question},
        lambda event: pieces.append(event.get("piece", "")),
        seconds=120,
    )
    return "".join(pieces)
