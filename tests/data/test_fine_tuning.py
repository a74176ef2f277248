"""Records for a language model: which tokens count in the loss, how samples are cut and padded, and which
records are refused as ambiguous.
"""

import json
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from node.content.sources import SampleParts, SourceWish, read
from node.content.tokens import Language
from node.errors import UsageError
from node.main import run
from node.protocols.data_table import DataTable
from tests.data.model_folders import TEMPLATE, write_folder, write_lines

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)


def read_for(source: Path, kind: str = "Qwen2ForCausalLM", *, window: Any = 0, **more: Any) -> SampleParts:
    """Return records as a model of this kind learns them. `config` belongs to the folder, the other arguments
    are keys of [data].
    """
    folder = write_folder(Path("m"), kind, **more.pop("config", {}))
    table = msgspec.convert({"source": str(source), **more}, DataTable)
    language = Language(str(folder / "tokenizer.json"), str(folder), window)
    return read(SourceWish(str(source), Path(), table, language=language, test=more.get("test", "")))


def learnt(samples: SampleParts) -> list[tuple[str, str]]:
    """Return, for each sample in order, the visible text and the text that counts in the loss; `.` stands for
    the rest.
    """
    import tokenizers

    known = cast("Any", tokenizers.Tokenizer.from_file("m/tokenizer.json"))
    rows = {}
    for part, arrays in samples.parts.items():
        for at, number in enumerate(samples.origins[part]):
            x, y = (arrays[name][at].tolist() for name in "xy")
            seen = "".join(known.id_to_token(each) for each in x).replace("<pad>", "")
            rows[int(number)] = (
                seen,
                "".join("." if each < 0 else known.id_to_token(each) for each in y).strip("."),
            )
    return [rows[number] for number in sorted(rows)]


PAIRS = ({"prompt": "1+1=", "completion": "2"}, {"prompt": "12+1=", "completion": "13", "id": 7})
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so"},
]


def test_only_the_completion_and_its_end_count() -> None:
    found = read_for(write_lines(Path("d.jsonl"), *PAIRS))
    assert learnt(found) == [("1+1=2", "2<|end|>"), ("12+1=13", "13<|end|>")]
    assert found.reading.window == 8
    told = "\n".join(found.reading.lines())
    assert "the loss counts the completions' tokens, not the prompts', and the end '<|end|>': 5 of 14" in told
    assert "no record is longer than 9 tokens, so none is cut" in told
    assert "padded at the end with '<pad>' (4), which does not count" in told
    assert "sample    '1+1=' -> '2'" in told


def test_records_longer_than_the_window_are_cut_and_counted() -> None:
    rows: list[dict[str, Any]] = [*PAIRS, {"prompt": "123456789", "completion": "x"}]
    found = read_for(write_lines(Path("d.jsonl"), *rows), window=5)
    assert learnt(found) == [("1+1=2", "2<|end|>"), ("12+1=", "1")]
    told = "\n".join(found.reading.lines())
    assert "2 of 3 records are longer than 6 tokens, and are cut at the end" in told
    assert "left out  1 records without an answer within 5 tokens" in told


def test_loss_all_counts_the_prompt_too() -> None:
    found = read_for(write_lines(Path("d.jsonl"), *PAIRS), loss="all")
    assert learnt(found)[0] == ("1+1=2", "+1=2<|end|>")


MARKED = TEMPLATE.replace(
    "{{ message.content }}<|end|>",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{{ '' }}",
)


@pytest.mark.parametrize(
    ("keys", "template", "counted"),
    [
        ({}, TEMPLATE, "yes<|end|>\n" + "." * 13 + "so<|end|>\n"),
        ({"loss": "last"}, TEMPLATE, "so<|end|>\n"),
        ({}, MARKED, "yes<|end|>" + "." * 6 + "so<|end|>"),
        ({"loss": "last"}, MARKED, "so<|end|>"),
    ],
)
def test_only_the_answers_of_a_chat_count(keys: dict[str, str], template: str, counted: str) -> None:
    source = write_lines(Path("d.jsonl"), {"messages": CHAT}, {"messages": CHAT[:2]})
    (seen, found), (_, short) = learnt(read_for(source, config={"template": template}, **keys))
    assert seen.startswith("<|user|>hi<|end|>\n<|assistant|>yes<|end|>\n<|user|>")
    assert found.replace(".", "") == counted.replace(".", "")
    assert short == counted.replace("so", "yes") if "last" in keys else short.startswith("yes<|end|>")


def test_a_template_that_hides_answers_needs_a_decision() -> None:
    hides = TEMPLATE.replace(
        "{{ message.content }}", "{{ message.content if loop.last or message.role == 'user' else '' }}"
    )
    source = write_lines(Path("d.jsonl"), *[{"messages": CHAT}] * 2)
    with pytest.raises(UsageError) as caught:
        read_for(source, config={"template": hides})
    assert "record 1: the chat template writes an answer differently once others follow it" in str(
        caught.value
    )
    assert 'loss = "last"' in (caught.value.written[1] or "")
    assert learnt(read_for(source, config={"template": hides}, loss="last"))[0][1] == "so<|end|>\n"


def test_chats_of_sharegpt_are_read_by_their_roles() -> None:
    chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    found = read_for(write_lines(Path("d.jsonl"), *[{"conversations": chat}] * 2))
    assert learnt(found)[0] == ("<|user|>hi<|end|>\n<|assistant|>yes<|end|>", "yes<|end|>\n")


def test_labels_get_the_class_numbers_of_the_model_folder() -> None:
    rows = [{"text": f"t{n}", "label": word} for n, word in enumerate(["good", "bad", "bad", "good"])]
    words = {"config": {"id2label": {"0": "good", "1": "bad"}}}
    found = read_for(write_lines(Path("d.jsonl"), *rows), "BertForSequenceClassification", **words)
    assert found.reading.words == ["good", "bad"]
    assert [(each.word, each.samples) for each in found.reading.classes] == [("good", 2), ("bad", 2)]
    for name in ("d.csv", "d.tsv"):
        mark = "\t" if name == "d.tsv" else ","
        lines = [f"text{mark}label", *(f"{row['text']}{mark}{row['label']}" for row in rows)]
        Path(name).write_text("\n".join(lines) + "\n")
        again = read_for(Path(name), "BertForSequenceClassification", **words)
        assert (again.parts["train"]["labels"] == found.parts["train"]["labels"]).all()


def test_a_translation_model_reads_prompts_and_writes_completions() -> None:
    found = read_for(write_lines(Path("d.jsonl"), *PAIRS), "T5ForConditionalGeneration", window=6)
    train = found.parts["train"]
    assert set(train) == {"input_ids", "attention_mask", "decoder_input_ids", "labels"}
    assert train["decoder_input_ids"][0, 1:3].tolist()[0] == train["labels"][0, 0]
    assert (train["labels"] == -100).any()


@pytest.mark.parametrize(
    ("rows", "kind", "config", "said", "asks"),
    [
        ([{"instruction": "a", "output": "b"}], "", {}, "prompt and completion, messages, or text", "output"),
        ([{"prompt": "a", "completion": "b", "context": "c"}], "", {}, "it has 'context'", "ignore"),
        ([{"messages": CHAT, "text": "b"}], "", {}, "'messages' and 'text'", 'text = "text"'),
        ([{"messages": CHAT}], "", {"template": ""}, "has no chat template", "chat_template.jinja"),
        ([{"messages": [{"role": "user"}, 3]}], "", {}, "messages with role and content", ""),
        ([{"prompt": 3, "completion": "b"}], "", {}, "record 1: prompt and completion are not both", ""),
        ([{"prompt": "a", "completion": "b"}, ["a"]], "", {}, "is not a record", "one record per line"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b"}], "", {}, "'chosen'", "ignore"),
        ([{"text": "a", "stars": 1}], "BertForSequenceClassification", {}, "text and label", "stars"),
        (
            [{"text": "a", "label": w} for w in ("u", "v")],
            "BertForSequenceClassification",
            {"id2label": {"0": "x", "1": "y"}},
            "it has labels 'u', 'v', the model 'x', 'y'",
            "classes",
        ),
        (
            [{"text": "a", "label": w} for w in ("u", "v", "w")],
            "BertForSequenceClassification",
            {},
            "3 classes, but the model in m distinguishes 2",
            "num_labels=3",
        ),
        ([{"text": "a"}], "BertForMaskedLM", {}, "records cannot be read for a model of this kind", "npz"),
        ([{}], "", {"source": '{"prompt": "a", "prompt": "b"}\n'}, "two fields have the name", ""),
    ],
)  # fmt: skip
def test_ambiguous_records_are_refused(
    rows: list[Any], kind: str, config: dict[str, Any], said: str, asks: str
) -> None:
    source = write_lines(Path("d.jsonl"), *rows)
    if text := config.pop("source", ""):
        source.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_for(source, kind or "Qwen2ForCausalLM", config=config)
    assert said in caught.value.written[0]
    assert asks in (caught.value.written[1] or "")


def test_a_line_copied_from_the_error_decides_between_columns(capsys: Capture) -> None:
    write_folder(Path("m"))
    write_lines(Path("d.jsonl"), *[{"instruction": "a", "input": "b", "output": "c"}] * 3)
    assert (
        run(["data", "show", "d.jsonl", "--model", "m", "--prompt", "instruction", "--completion", "output"])
        == 2
    )
    line = next(each for each in capsys.readouterr().err.splitlines() if "data = {" in each)
    decided = line[line.index("data = {") :].split(" or ")[1]
    assert 'prompt = ["instruction", "input"]' in decided
    Path("RUN.toml").write_text(f'model = "m"\n{decided}\n')
    assert run(["data", "show", "RUN.toml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["samples"][0] == "'a\\nb' -> 'c'"


def test_json_lines_without_a_tokenizer_need_a_decision(capsys: Capture) -> None:
    write_lines(Path("d.jsonl"), {"a": 1, "label": 0}, {"a": 2, "label": 1})
    assert run(["data", "show", "d.jsonl"]) == 2
    assert 'form = "bytes"' in capsys.readouterr().err
