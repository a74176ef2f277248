"""Folders in transformers' format are captured with or without their weights; some files in them are
ignored."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import torch

from node.cli.model_folders import write_model_folder
from node.content.model_folder import FOLDER_FILES, LENGTH_MAX, read_model_folder
from node.content.tokens import Tokens
from node.main import run
from partition.capture.errors import CaptureRefused
from partition.capture.hugging_face import folder_task, is_folder
from partition.capture.models.model_spec import capture_folder
from partition.model.graph import StoredValues
from tests.data.model_folders import write_folder, write_lines

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}


def models() -> dict[str, Any]:
    """One small folder of each kind."""
    llama = transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    bert = transformers.BertConfig(**SIZES, num_labels=3)
    roberta = transformers.RobertaConfig(**SIZES)
    gpt2 = transformers.GPT2Config(vocab_size=29, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    t5 = transformers.T5Config(
        vocab_size=29, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    vit = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8,
        patch_size=4, num_labels=2,
    )  # fmt: skip
    return {
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "llama": transformers.LlamaForCausalLM(llama),
        "bert": transformers.BertForSequenceClassification(bert),
        "masked": transformers.RobertaForMaskedLM(roberta),
        "tokens": transformers.BertForTokenClassification(bert),
        "t5": transformers.T5ForConditionalGeneration(t5),
        "vit": transformers.ViTForImageClassification(vit),
    }


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("gpt2", ["input_ids"]),
        ("llama", ["input_ids"]),
        ("bert", ["input_ids", "attention_mask"]),
        ("masked", ["input_ids", "attention_mask"]),
        ("tokens", ["input_ids", "attention_mask"]),
        ("t5", ["input_ids", "attention_mask", "decoder_input_ids"]),
        ("vit", ["pixel_values"]),
    ],
)
def test_a_saved_model_is_captured_with_its_weights(tmp_path: Path, name: str, inputs: list[str]) -> None:
    torch.manual_seed(1)
    model = models()[name]
    model.save_pretrained(tmp_path)
    assert is_folder(str(tmp_path))
    found = capture_folder(str(tmp_path), options={"length": 6} if "pixel_values" not in inputs else {})
    assert [port.name for port in found.graph.entries[0].inputs] == inputs
    assert found.graph.entries[0].loss is not None
    saved = model.state_dict()
    assert found.stored
    for key, value in found.stored:
        assert torch.equal(value, saved[key]), key


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "masked", "tokens", "t5", "vit"])
def test_a_result_written_as_a_folder_is_loaded_by_transformers(tmp_path: Path, name: str) -> None:
    torch.manual_seed(2)
    model = models()[name].eval()
    model.save_pretrained(tmp_path / "came")
    trained = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    model.load_state_dict(trained)  # of several tied names, the one given last
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    safetensors.numpy.save_file(state, tmp_path / "result", {"format": "pt"})
    out = tmp_path / "out"
    out.mkdir()
    for file in FOLDER_FILES:
        if (tmp_path / "came" / file).is_file():
            (out / file).write_bytes((tmp_path / "came" / file).read_bytes())
    most = 5_000_000_000 if name == "bert" else 4_096
    files = write_model_folder(tmp_path / "result", out, ["a", "b"], shard_bytes_max=most)
    assert (len(files) > 1) == (out / "model.safetensors.index.json").is_file() == (name != "bert")
    again, told = type(model).from_pretrained(out, output_loading_info=True, local_files_only=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    assert again.dtype == torch.float32
    assert name != "vit" or again.config.id2label == {0: "a", 1: "b"}


def predicted(folder: Path, data: str, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """Return the result of `predict` for a folder's model with its own weights."""
    (folder / "RUN.toml").write_text(f'model = "m"\ndata = "{data}"\n')
    weights = str(folder / "m" / "model.safetensors")
    assert run(["predict", str(folder / "RUN.toml"), "--weights", weights, "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_model_answers_prompts_as_transformers_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    sizes = SIZES | {"vocab_size": 128, "max_position_embeddings": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, eos_token_id=0)).eval()
    model.save_pretrained(write_folder(tmp_path / "m"))
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    safetensors.numpy.save_file(state, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(8)]
    write_lines(tmp_path / "d.jsonl", *rows)
    found = predicted(tmp_path, "d.jsonl", capsys, "--prompt", "5+1=", "--tokens", "6")
    known = Tokens(tmp_path / "m" / "tokenizer.json")
    ids = torch.tensor([known.encode("5+1=").ids])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    said = known.decode([each for each in wanted[0, ids.shape[1] :].tolist() if each])
    assert found["answers"] == [{"prompt": "5+1=", "predicted": said, "truth": None}]
    judged = predicted(tmp_path, "d.jsonl", capsys, "--tokens", "2", "--out", str(tmp_path / "a.jsonl"))
    assert judged["metrics"]["tokens"] == 2  # one held-out sample: its completion, and its end
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1
    drawn = [
        predicted(tmp_path, "d.jsonl", capsys, "--prompt", "5", "--temperature", "2", "--seed", seed)[
            "answers"
        ]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_classifier_answers_texts_with_the_folders_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    sizes = SIZES | {"vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 4}
    words = {0: "good", 1: "bad"}
    config = transformers.BertConfig(**sizes, id2label=words, label2id={"good": 0, "bad": 1})
    folder = write_folder(tmp_path / "m", "BertForSequenceClassification")
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    write_lines(tmp_path / "d.jsonl", *[{"text": f"t{n}", "label": words[n % 2]} for n in range(10)])
    found = predicted(tmp_path, "d.jsonl", capsys, "--out", str(tmp_path / "p.csv"))
    assert 0 <= found["metrics"]["accuracy"] <= 1
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert {each.split(",")[1] for each in lines[1:]} <= {"good", "bad"}
    flags = ["predict", str(tmp_path / "RUN.toml"), "--weights", str(folder / "model.safetensors")]
    assert run([*flags, "--prompt", "t1"]) == 0
    assert re.search(r"t1 -> (good|bad)$", capsys.readouterr().out, re.MULTILINE)


def test_a_plan_reads_no_weights(tmp_path: Path) -> None:
    models()["llama"].save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = capture_folder(str(tmp_path), options={"values": False})
    assert not found.stored
    assert not any(isinstance(row.source, StoredValues) for row in found.graph.parameters)
    with pytest.raises(CaptureRefused, match="no weights in safetensors"):
        capture_folder(str(tmp_path))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    models()["llama"].save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CaptureRefused, match=r"pytorch_model\.bin is pickled"):
        folder_task(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "does not say under 'architectures'"),
        ({"architectures": ["EvilForCausalLM"], "auto_map": {"AutoModel": "evil.Evil"}}, "is not run"),
        ({"architectures": ["AutoConfig"]}, "has no model 'AutoConfig'"),
        ({"architectures": ["__dict__"]}, "has no model"),
        ({"architectures": ["LlamaModel"], "model_type": "llama", **SIZES}, "has no loss that is known"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "no such"}, "LlamaForCausalLM: "),
        ([], "is no table"),
    ],
)
def test_folders_without_a_transformers_model_are_refused(tmp_path: Path, config: object, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(CaptureRefused, match=words):
        folder_task(tmp_path, values=False)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "masked", "t5", "vit"])
def test_a_folder_is_read_the_same_without_torch(tmp_path: Path, name: str) -> None:
    models()[name].save_pretrained(tmp_path)
    config = models()[name].config
    found = read_model_folder(tmp_path)
    if name != "vit":
        ids = folder_task(tmp_path, values=False).example_inputs["input_ids"]  # type: ignore[call-overload]  # by name
        assert ids.shape[1] == min(found.length_max, LENGTH_MAX)
        assert found.vocabulary == config.vocab_size
    assert found.is_of_text == (name != "vit")
    assert found.classes == config.num_labels


def test_more_tokens_than_the_model_accepts_are_refused(tmp_path: Path) -> None:
    models()["gpt2"].save_pretrained(tmp_path)
    with pytest.raises(CaptureRefused, match="accepts at most 12 tokens"):
        folder_task(tmp_path, length=13)


def test_the_missing_transformers_package_is_named_with_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CaptureRefused, match=r"-m pip install transformers$"):
        folder_task(tmp_path)
