"""Real processes serve a transformers folder, with its tokenizer, template and stop sequences."""

import codecs
import json
import pydoc_data.topics
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

import node
from crypto.contact import parse_address
from crypto.encoding import clean_text
from node import config
from node.cli.client import NodeRefused, ask
from node.demo.processes import SwarmProcesses
from node.errors import UsageError
from node.main import run
from partition.capture.models.gpt import GPT, GPTConfiguration
from partition.capture.serving_proof import TOLERANCES
from partition.capture.weights import write_weights
from tests.partition.test_serving_proof import Convolution, captured_words
from tests.source import ROOT

NAMES = "abc"
TEXT = "\n".join(list(pydoc_data.topics.topics.values())[:12]) + "äöü ß é " * 40
PROMPT = "The quick brown fox, encore un été"
QUESTION, SYSTEM = "What does an assignment statement evaluate?", "You know Python."
END, BEGIN = "<end>", "<begin>"
TEMPLATE = (
    "{% for message in messages %}<begin>{{ message['role'] }}\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<begin>assistant\n{% endif %}"
)
RUN = """
model = "gpt"
data = "text.txt"

[options]
layers = 2
heads = 2
width = 16

[train]
steps = 4
batch = 4
microbatch = 4
window = 32
seed = 1

[plan]
stages = 1
checkpoint_every = 2
"""
TOKENS = 40
SURE_LETTERS = 8
"""Minimum number of characters of an answer that are compared."""
SECONDS_MAX = 60.0
"""Seconds allowed on a machine that is three times slower than ours, and busy."""


def await_members(swarm: SwarmProcesses) -> None:
    """Wait until every node knows both others."""
    end = time.monotonic() + SECONDS_MAX
    while any(swarm.status(name)["members_alive"] < len(NAMES) - 1 for name in NAMES):
        assert time.monotonic() < end, "the nodes did not find each other"
        Event().wait(0.1)


def make_folder(folder: Path, context: int = 256) -> tuple[Any, Any]:
    """Write a folder in the usual form, with sharded weights in bfloat16; return the model and its
    tokenizer."""
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=[END, BEGIN], initial_alphabet=alphabet, show_progress=False
    )
    bare.train_from_iterator([TEXT], trainer)
    known = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=END, bos_token=BEGIN)
    known.chat_template = TEMPLATE
    known.save_pretrained(folder)
    torch.manual_seed(17)
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    settings |= {"num_key_value_heads": 2, "vocab_size": 400, "max_position_embeddings": context}
    settings |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 0, "initializer_range": 0.4}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).to(torch.bfloat16).eval()
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model, known


def greedy(model: Any, ids: list[int], tokens: int) -> list[int]:
    """Return transformers' own continuation, up to the first step at which rounding may decide."""
    found = list(ids)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(torch.tensor([found])).logits[0, -1].float()
            (first, second), (best, _) = logits.topk(2)
            if first - second < TOLERANCES[torch.bfloat16] * logits.abs().max():
                break
            found.append(int(best))
    return found[len(ids) :]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SwarmProcesses, Path, Any, Any]]:
    """Yield three nodes, and a folder that `peerloom serve` has published at the first, in two stages."""
    folder = tmp_path_factory.mktemp("text")
    swarm = SwarmProcesses(folder / "nodes", "text", time.sleep, with_page="c", calibrate=False)
    (folder / "nodes").mkdir()
    try:
        swarm.launch(NAMES)
        path = folder / "tiny"
        model, known = make_folder(path)
        # The seventh token that this model emits is made the token that ends its answers.
        asked = json.loads((path / "generation_config.json").read_text())
        asked["eos_token_id"] = [0, greedy(model, known(PROMPT)["input_ids"], 7)[-1]]
        (path / "generation_config.json").write_text(json.dumps(asked))
        first = swarm.start(NAMES[0], None)
        for name in NAMES[1:]:
            swarm.start(
                name, first.address, ["--log", "json", "--record", str(folder / f"nodes/{name}.record")]
            )
        await_members(swarm)
        assert run(["serve", str(path), "--stages", "2", "--data-dir", str(folder / "nodes/a")]) == 0
        yield swarm, path, model, known
    finally:
        swarm.close()


def answer_of(model: Any, ids: list[int], ends: list[int], tokens: int) -> list[int]:
    """Return the beginning of an answer by transformers, up to a token that ends it, if any."""
    found = greedy(model, ids, tokens)
    return found[: next((at for at, token in enumerate(found) if token in ends), tokens)]


def test_a_served_folder_accepts_and_returns_text(
    served: tuple[SwarmProcesses, Path, Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    swarm, path, model, known = served
    ends = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    capsys.readouterr()
    # The weights are stored and transferred in the folder's data types.
    (values,) = [
        each for each in (swarm.folder / "a/models").glob("*.safetensors") if b"BF16" in each.read_bytes()
    ]
    assert values.stat().st_size < 2 * sum(each.numel() for each in model.parameters()) + 4096
    # A node that holds nothing of the model fetches the tokenizer by hash.
    door = str(swarm.folder / "c")
    assert run(["generate", "tiny", PROMPT, "--max-tokens", str(TOKENS), "--json", "--data-dir", door]) == 0
    told = json.loads(capsys.readouterr().out)
    wanted = answer_of(model, known(PROMPT)["input_ids"], ends, TOKENS)
    assert told["text"] == known.decode(wanted, skip_special_tokens=True)
    assert (told["tokens"], told["finish"]) == (len(wanted), "stop")
    assert len(told["route"]) == 2
    # The pieces consist of whole characters: none ends within a character.
    pieces: list[str] = []
    asked = {
        "service": "tiny",
        "question": {"prompt": PROMPT, "tokens_max": 200, "temperature": 2.0, "seed": 5},
    }
    ask(
        swarm.folder / "c", "generate", asked, lambda event: pieces.append(event.get("piece", "")), seconds=60
    )
    codecs.decode("".join(pieces).encode(), "utf-8")
    assert len(pieces) > 1


def test_a_chat_continues_after_an_answer_was_stopped(served: tuple[SwarmProcesses, Path, Any, Any]) -> None:
    swarm, path, model, known = served
    door = swarm.folder / "c"
    ids = known.apply_chat_template(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_dict=False,
    )
    ends = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    # The last token's bytes may be an incomplete character.
    wanted = known.decode(answer_of(model, ids, ends, TOKENS), skip_special_tokens=True).rstrip("\ufffd")
    assert len(wanted) >= SURE_LETTERS
    # A model's output cannot control a terminal.
    shown = "".join(each if each in "\n\t" else clean_text(each) for each in wanted).encode()
    command = [sys.executable, "-P", "-m", "node", "chat", "tiny", "--system", SYSTEM]
    command += ["--max-tokens", str(TOKENS), "--data-dir", str(door)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        bufsize=0,
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(f"{QUESTION}\n".encode())
        first = b""
        while len(first) < len(shown):
            more = chat.stdout.read(len(shown) - len(first))
            assert more, chat.stderr and chat.stderr.read()
            first += more
        assert first == shown
        chat.stdin.write(b"Say more.\n")
        assert chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        chat.stdin.write(b"And again.\n")
        chat.stdin.close()
        rest = chat.stdout.read()
        errors = chat.stderr.read().decode() if chat.stderr is not None else ""
        assert chat.wait(SECONDS_MAX) == 0, errors
    assert rest.endswith(b"\n")
    assert "88 %" not in errors


def test_prompts_and_answers_are_in_no_file(
    served: tuple[SwarmProcesses, Path, Any, Any], tmp_path: Path
) -> None:
    swarm, _, _, known = served
    secret = "the secret of the seventh seal"
    said: list[str] = []
    asked = {
        "service": "tiny",
        "question": {"prompt": secret, "tokens_max": 60, "temperature": 1.5, "seed": 1},
    }
    ask(swarm.folder / "c", "generate", asked, lambda event: said.append(event.get("piece", "")), seconds=60)
    assert run(["report", "--out", str(tmp_path / "report.zip"), "--data-dir", str(swarm.folder / "c")]) == 0
    with zipfile.ZipFile(tmp_path / "report.zip") as packed:
        packed.extractall(tmp_path / "report")
    answer = "".join(said)[:24].encode()
    ids = known(secret)["input_ids"]
    forms = [secret.encode(), answer, json.dumps(ids)[1:-1].encode(), torch.tensor(ids).numpy().tobytes()]
    files = [each for each in [*swarm.folder.rglob("*"), *tmp_path.rglob("*")] if each.is_file()]
    assert any(each.name.endswith(".record") for each in files)
    for each in files:
        data = each.read_bytes()
        assert not [form for form in forms if form in data], each


def test_a_finished_run_is_served_by_its_id(
    served: tuple[SwarmProcesses, Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm, _, _, _ = served
    data_dir = str(swarm.folder / "a")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "RUN.toml").write_text(RUN)
    out = tmp_path / "state.safetensors"
    assert run(["train", str(tmp_path / "RUN.toml"), "--out", str(out), "--data-dir", data_dir]) == 0
    capsys.readouterr()
    (known,) = ask(swarm.folder / "a", "status")["runs"]
    assert run(["serve", known["run"][:8], "--json", "--data-dir", data_dir]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["step"], told["text"]) == (known["run"], 4, "bytes")
    model = GPT(GPTConfiguration(256, 32, 2, 2, 16))
    model.load_state_dict(load_file(out), strict=False)
    ids = list(b"An assignment")
    wanted = list(ids)
    with torch.no_grad():
        for _ in range(12):
            wanted.append(int(model.eval()(torch.tensor([wanted]))[0, -1].argmax()))
    events: list[dict[str, Any]] = []
    asked = {"service": told["service"], "question": {"prompt": ids, "tokens_max": 12}}
    ask(swarm.folder / "b", "generate", asked, events.append, seconds=60)
    pieces = [event["piece"] for event in events if "piece" in event]
    assert pieces == wanted[len(ids) :]
    assert run(["services", "--stop", told["service"], "--data-dir", data_dir]) == 0


def test_a_program_gets_the_hidden_states_of_transformers(
    served: tuple[SwarmProcesses, Path, Any, Any], tmp_path: Path
) -> None:
    swarm, _, model, known = served
    settings = config.Config(
        name="reader",
        data_dir=tmp_path / "reader",
        swarm=config.SwarmSettings(name="text", preset="host"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False, seeds=(parse_address(swarm.nodes[NAMES[0]].address),)),
        resources=config.Resources(calibrate=False),
    )
    with node.sync(settings) as me:
        me.wait_for_members(len(NAMES))
        rows = me.hidden("tiny", PROMPT)
        assert np.array_equal(rows, me.hidden("tiny", known(PROMPT)["input_ids"]))
        with pytest.raises(UsageError, match="no service is called"):
            me.hidden("nothing", PROMPT)
    with torch.no_grad():
        states = model(torch.tensor([known(PROMPT)["input_ids"]]), output_hidden_states=True).hidden_states
    wanted = states[-1][0].float().numpy()
    assert rows.shape == wanted.shape
    assert np.abs(rows - wanted).max() <= TOLERANCES[torch.bfloat16] * np.abs(wanted).max()


def test_an_encoder_returns_the_vectors_of_transformers(
    served: tuple[SwarmProcesses, Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm, path, _, known = served
    folder, door = tmp_path / "vectors", swarm.folder / "c"
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 400, "max_position_embeddings": 64}
    torch.manual_seed(2)
    model = transformers.BertModel(transformers.BertConfig(**sizes, initializer_range=0.4)).eval()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes())
    assert run(["serve", str(folder), "--data-dir", str(swarm.folder / "a")]) == 0
    key = ask(door, "keys.new", {"name": "test"})["key"]
    texts = [PROMPT, "été", "A rather longer text, of several words."]
    with openai.OpenAI(api_key=key, base_url=f"{swarm.status('c')['page']}/v1", max_retries=0) as client:
        # The client requests base64 on its own, and decodes it.
        found = client.embeddings.create(model="vectors", input=texts)
        one = client.embeddings.create(
            model="vectors", input=known(texts[1])["input_ids"], encoding_format="float", dimensions=8
        )
        assert next(row for row in client.models.list() if row.id == "vectors")
        with pytest.raises(openai.BadRequestError, match="takes at most 64") as refused:
            client.embeddings.create(model="vectors", input=["word " * 100])
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="is a language model"):
            client.embeddings.create(model="tiny", input="a")
        with pytest.raises(openai.BadRequestError, match="Use /v1/embeddings"):
            client.completions.create(model="vectors", prompt="a")
        with pytest.raises(openai.BadRequestError, match="dimensions: vectors has 32"):
            client.embeddings.create(model="vectors", input="a", dimensions=33)
    with torch.no_grad():
        wanted = [
            model(torch.tensor([known(each)["input_ids"]])).last_hidden_state[0].mean(0) for each in texts
        ]
    for row, vector in zip(found.data, wanted, strict=True):
        assert torch.allclose(torch.tensor(row.embedding), vector / vector.norm(), atol=1e-5)
    assert found.usage.prompt_tokens == sum(len(known(each)["input_ids"]) for each in texts)
    short = wanted[1][:8]
    assert torch.allclose(torch.tensor(one.data[0].embedding), short / short.norm(), atol=1e-5)
    capsys.readouterr()
    assert run(["generate", "vectors", "a", "--data-dir", str(door)]) == 2
    assert "gives vectors of texts" in capsys.readouterr().err
    assert run(["services", "--stop", "vectors", "--data-dir", str(swarm.folder / "a")]) == 0


@pytest.mark.slow
def test_a_service_without_a_chat_template_suggests_generate(
    served: tuple[SwarmProcesses, Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm, path, _, _ = served
    data_dir = str(swarm.folder / "a")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    from node.cli.capture import captured_to_serve

    with captured_to_serve(str(path)) as file:
        options = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--name", "plain", "--data-dir", data_dir]
        assert run(["serve", file, *options]) == 0
    assert run(["chat", "plain", "--data-dir", data_dir]) == 2
    assert "generate, which continues plain text" in capsys.readouterr().err
    assert run(["services", "--stop", "plain", "--data-dir", data_dir]) == 0


def test_no_client_of_a_node_publishes_an_unproved_model(
    served: tuple[SwarmProcesses, Path, Any, Any], tmp_path: Path
) -> None:
    swarm, _, _, _ = served
    captured = captured_words(Convolution())
    file = tmp_path / "mixed.peerloom"
    file.write_bytes(captured.data)
    write_weights(file.with_suffix(".safetensors"), captured)
    # The request goes straight to the control channel, bypassing the command's checks.
    with pytest.raises(NodeRefused, match=r"cannot be served: .*mixer\.conv mixes tokens") as refused:
        ask(swarm.folder / "a", "serve", {"model": str(file), "wish": {}}, seconds=SECONDS_MAX)
    assert refused.value.exit_code == 2
    assert "is_causal=True" in (refused.value.do or "")
