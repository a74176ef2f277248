"""`/metrics`: the counted values, the limit on labels, and deployed rules that use only existing names."""

import json
import re
from types import SimpleNamespace

import msgspec
import trio
import trio.lowlevel
from prometheus_client.parser import text_string_to_metric_families

from node import events
from node.serving_events import GenerationEnded
from node.web import metrics, model_metrics
from tests.node.serving.told import serving_events
from tests.node.web.models_world import NAME, models
from tests.node.web.test_models_door import ASKED, post
from tests.node.web.world import STARTED, Told, joined, peer, run_events, served, started
from tests.source import ROOT


def told() -> Told:
    node = Told(counters={"datagrams_sent": 7, "protocol_errors": 3})
    for event in [started(), *(joined(number) for number in range(1, 5)), *run_events()]:
        node.publish(event)
    node.publish(events.MemberLost(at=STARTED, peer=peer(2), reason="no ack"))
    node.publish(events.ReachabilityFound(at=STARTED, reachable=True, asked=3, of=3, addresses=()))
    return node


async def scraped(node: Told) -> dict[tuple[str, ...], float]:
    async with served(node) as page:
        page.page.live.tick()
        page.page.live.metrics.models.between("gpt", 0.01)
        page.page.live.metrics.models.queued("gpt", 0.01)
        status, headers, body = await page.ask("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


async def test_metrics_count_events() -> None:
    found = await scraped(told())
    assert found["peerloom_members", "alive"] == 3
    assert found["peerloom_members", "dead"] == 1
    assert found["peerloom_steps_committed_total",] == 3
    assert found["peerloom_samples_total",] == 384
    assert found["peerloom_frame_bytes_total", "forward"] == 3_000
    assert found["peerloom_step_seconds_count",] == 3
    assert found["peerloom_step_seconds_bucket", "0.5"] == 3
    assert found["peerloom_step_seconds_bucket", "0.25"] == 0
    assert found["peerloom_traffic_total", "datagrams_sent"] == 7
    assert found["peerloom_refused_total", "protocol_errors"] == 3
    assert found["peerloom_events_total", "MemberJoined"] == 4
    assert found["peerloom_stage_utilisation_ratio", "0"] == 0.8


def answered(node: Told, stages: int = 1) -> Told:
    """Return the events together with an answer of a model whose stages are held here, counted in each
    way."""
    for event in serving_events(STARTED, peer(1), peer(2)):
        node.publish(event)
    listing = SimpleNamespace(sessions=2, tokens=300, tokens_max=4_096)
    service = SimpleNamespace(id=b"gpt", manifest=SimpleNamespace(name="gpt"))
    node.serving.hosting.own = lambda: [(service, listing)] * stages
    return node


async def test_a_session_that_uses_two_stages_of_one_node_counts_once() -> None:
    found = await scraped(answered(told(), 2))
    assert found["peerloom_model_sessions", "gpt"] == 2
    assert found["peerloom_model_cache_tokens", "gpt"] == 600


async def test_metrics_count_answers_of_models() -> None:
    found = await scraped(answered(told()))
    assert found["peerloom_answers_total", "gpt", "length"] == 1
    assert found["peerloom_answers_total", "gpt", "failed"] == 0
    assert found["peerloom_answer_tokens_total", "gpt"] == 40
    assert found["peerloom_answer_prompt_tokens_total", "gpt"] == 7
    assert found["peerloom_answer_moves_total", "gpt"] == 1
    assert found["peerloom_answer_first_token_seconds_bucket", "0.25", "gpt"] == 1
    assert found["peerloom_answer_token_seconds_bucket", "0.1"] == 1
    assert found["peerloom_answer_token_seconds_bucket", "0.05"] == 0
    assert found["peerloom_model_requests_waiting",] == 0
    assert found["peerloom_model_sessions", "gpt"] == 2
    assert found["peerloom_model_cache_tokens", "gpt"] == 300
    assert found["peerloom_model_cache_tokens_max", "gpt"] == 4_096


async def test_requests_over_http_are_counted_by_their_model() -> None:
    async with models(text="bytes") as (page, _, key):
        page.page.live.metrics.models.between(NAME, 0.004)
        await post(page, key, ASKED)
        await post(page, key, {**ASKED, "model": "mistyped"})
        _, _, body = await page.ask("/metrics")
    assert b'peerloom_answer_queue_seconds_count{model="words"} 1.0' in body
    assert b'peerloom_answer_queue_seconds_count{model="other"} 1.0' in body
    assert b'peerloom_answer_between_tokens_seconds_bucket{le="0.005",model="words"} 1.0' in body
    assert b"mistyped" not in body


def test_models_beyond_the_label_limit_are_counted_together() -> None:
    counted = model_metrics.ModelMetrics()
    (ended,) = (
        each for each in serving_events(STARTED, peer(1), peer(2)) if isinstance(each, GenerationEnded)
    )
    for number in range(model_metrics.MODELS_MAX + 5):
        counted.ended(msgspec.structs.replace(ended, name=f"m{number}"))
    (answers, *_) = counted.families(())
    assert len({sample.labels["model"] for sample in answers.samples}) == model_metrics.MODELS_MAX
    (first, *_) = (each.collect() for each in counted.histograms)
    sums = {
        each.labels["model"]: each.value for each in next(iter(first)).samples if each.name.endswith("_count")
    }
    assert sums[model_metrics.OTHER] == 5


async def test_peers_and_runs_are_not_labels() -> None:
    few, node = await scraped(told()), told()
    for number in range(10, 200):
        node.publish(joined(number))
        for event in run_events(f"{number:016x}"):
            node.publish(event)
    many = await scraped(node)
    assert set(many) == set(few)


async def test_every_event_between_two_scrapes_is_counted() -> None:
    node = told()
    async with served(node) as page:
        for number in range(5):
            node.publish(joined(100 + number))
            await page.ask("/metrics")
            await trio.lowlevel.checkpoint()
        _, _, body = await page.ask("/metrics")
    assert b'peerloom_events_total{kind="MemberJoined"} 9.0' in body


def test_every_metric_has_help_and_a_base_unit() -> None:
    text = metrics.Metrics().text(told().state, {}, {"page_watchers": 0.0}, "1").decode()
    families = list(text_string_to_metric_families(text))
    assert len(families) > 25
    for family in families:
        assert family.name.startswith("peerloom_")
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)\Z", family.name)


def names_of(expression: str) -> set[str]:
    return set(re.findall(r"\bpeerloom_\w+", expression))


async def test_deployed_rules_use_only_metrics_that_exist() -> None:
    known = {name for name, *_ in await scraped(answered(told()))}
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [
        variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    rules = (ROOT / "deploy/alerts.yml").read_text()
    asked += re.findall(r"^ +expr: (.+)", rules, re.MULTILINE)
    assert len(asked) >= 25
    for expression in asked:
        assert names_of(expression), expression
        assert names_of(expression) <= known, expression


async def test_deployed_rules_use_only_labels_that_exist() -> None:
    found = await scraped(told())
    text = (ROOT / "deploy/alerts.yml").read_text()
    assert ("peerloom_members", "alive") in found
    assert set(re.findall(r'status="(\w+)"', text)) <= {"alive", "running"}
