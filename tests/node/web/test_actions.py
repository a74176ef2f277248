"""Actions of a user on the page are accepted only with the token and from the page's origin."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.config import Resources
from node.events import Event, StepCommitted
from node.services.metadata import read_metadata
from node.web.prediction import Predictor
from node.web.views import peer_key
from tests.node.web.world import Served, Told, served, started
from tests.stack import manifest, simulate, swarm, train

RUN = 'model = "simple-cnn"\ndata = "digits"\n[train]\nsteps = 2\nbatch = 32\nmicrobatch = 16\n'
TOKEN = bytes(range(16)).hex()


async def act(page: Served, name: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Return (status, document) of an action with the token."""
    headers = {"content_type": "application/json", "x_peerloom_token": TOKEN, **headers}
    status, _, answer = await page.ask(
        f"/api/actions/{name}", method="POST", body=json.dumps(body).encode(), **headers
    )
    return status, json.loads(answer)


def told(folder: Path) -> Told:
    node = Told()
    node.config = replace(node.config, data_dir=folder)
    node.publish(started())
    return node


@pytest.mark.parametrize("name", ["start", "limits"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x_peerloom_token": ""}, 401),
        ({"x_peerloom_token": "0" * 32}, 401),
        ({"origin": "http://evil.example"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"host": "evil.example"}, 421),
        ({"content_type": "text/plain"}, 415),
    ],
)
async def test_outsiders_cannot_start_a_run_or_change_a_limit(
    name: str, headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    async with served(told(tmp_path)) as page:
        answered, _ = await act(page, name, {"text": RUN, "accept_runs": "never"}, **headers)
        assert answered == status
        assert page.node.config.resources == Resources()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "model"),
        ("model = 7", "model"),
        (RUN.replace("simple-cnn", "/tmp/own.py:make"), "your own code"),
        (RUN.replace("digits", "/tmp/own.py:samples"), "your own code"),
        (RUN + "#" * 40_000, "characters"),
        (RUN.replace("steps = 2", "steps = -2"), "steps"),
    ],
)
async def test_an_invalid_run_file_is_refused_with_the_reason(text: str, said: str, tmp_path: Path) -> None:
    async with served(told(tmp_path)) as page:
        status, document = await act(page, "start", {"text": text})
        assert status == 409
        assert said in document["error"]


async def test_a_run_is_submitted_to_the_node_itself(tmp_path: Path) -> None:
    model = tmp_path / "own.peerloom"
    model.write_bytes(b"captured before")
    async with served(told(tmp_path)) as page:
        status, document = await act(page, "start", {"text": RUN.replace("simple-cnn", str(model))})
        assert (status, document["result"]) == (200, {"run": "ab" * 8, "status": "running"})
        [(asked, arguments)] = page.node.asked
        assert (asked, arguments["graph"], arguments["follow"]) == ("train", str(model), False)
        assert arguments["run"]["train"]["steps"] == 2


async def test_a_model_that_cannot_be_prepared_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with served(told(tmp_path)) as page:
        status, document = await act(page, "start", {"text": RUN.replace("simple-cnn", "/none.peerloom")})
        assert status == 409
        assert "there is no file /none.peerloom" in document["error"]


async def test_whether_stages_are_accepted_can_be_changed_and_is_shown(tmp_path: Path) -> None:
    async with served(told(tmp_path)) as page:
        status, document = await act(page, "limits", {"accept_runs": "never"})
        assert (status, document["result"]["accept_runs"]) == (200, "never")
        assert (await page.json("/api/view"))["node"]["limits"]["accept_runs"] == "never"
        assert (await act(page, "limits", {"accept_runs": "sometimes"}))[0] == 409


def test_others_learn_that_a_node_no_longer_accepts_stages() -> None:
    async def scenario() -> None:
        import trio

        async with swarm("ab", preset="lan") as group:
            group.nodes["a"].limit(accept_runs="never")
            await trio.sleep(10)
            of_a = next(each for each in group.nodes["b"].membership.members if each.name == "a")
            claim = read_metadata(of_a.metadata)
            assert claim is not None
            assert not claim.accepts_runs

    simulate(scenario)


def test_the_planner_predicts_a_run_without_some_peers() -> None:
    async def scenario() -> None:
        async with swarm("abcde") as group:
            node, found = group.nodes["a"], dict[str, Any]()

            async def ask(event: Event) -> None:
                if isinstance(event, StepCommitted) and not found:
                    plan = node.state.runs[event.run].plan
                    assert plan is not None
                    gone = peer_key(plan.stages[0][0])
                    predictor = Predictor(node)
                    with_all = await predictor.predict(event.run, frozenset())
                    without = await predictor.predict(event.run, frozenset({gone}))
                    everybody = frozenset(peer_key(each.peer) for each in group.nodes.values())
                    found.update(
                        all=with_all,
                        less=without,
                        none=await predictor.predict(event.run, everybody),
                        name=group.name_of(plan.stages[0][0]),
                        unknown=await predictor.predict("ab" * 8, frozenset()),
                    )

            await train(group, "a", manifest(steps=3), ask)
            assert found["all"]["rate_share"] == 1.0
            assert found["unknown"] is None
            assert not found["none"]["then"]["is_feasible"]
            assert found["less"]["now"] == found["all"]["now"]
            planned = [name for stage in found["less"]["then"]["stages"] for name in stage["peers"]]
            assert planned
            assert found["name"] not in planned

    simulate(scenario)
