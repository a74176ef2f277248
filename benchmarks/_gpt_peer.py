"""One of the scripts that `optimizer_peers.py` compares: it trains a small GPT with peers, or alone.

    python benchmarks/_gpt_peer.py KIND NUMBER COUNT FOLDER

KIND is `ours`, `hivemind` (with the packages that PEERLOOM_HIVEMIND names) or `silent`, which has no peers.
It reads JSON documents, one per line, and answers each with one.
"""

import json
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

warnings.filterwarnings("ignore")
OURS = sys.stdout
sys.stdout = sys.stderr  # stdout is reserved for the answers
ROOT = Path(__file__).parents[1]
BLOCK, LAYERS, HEADS, WIDTH = 64, 4, 4, 128
RATE, BATCH, TARGET = 1e-3, 16, 256
HELD_BATCHES = 8
MATCHMAKING_SECONDS = 1.0
"""Matchmaking time for hivemind: about the time of a step; its authors recommend less than that."""
JOINED_SECONDS = 60.0


def say(**document: object) -> None:
    print(json.dumps(document), file=OURS, flush=True)


def hear() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sys.stdin.readline())
    return found


class GPT(torch.nn.Module):
    """A decoder over bytes with tied embeddings, of 0.83 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, WIDTH)
        self.places = torch.nn.Embedding(BLOCK, WIDTH)
        torch.nn.init.normal_(self.tokens.weight, std=0.02)
        torch.nn.init.normal_(self.places.weight, std=0.02)
        layers = [
            torch.nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        ]
        self.layers = torch.nn.ModuleList(layers)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(BLOCK)
        found = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            found = layer(found, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.norm(found) @ self.tokens.weight.T
        return logits


class Text:
    """The repository's own documents as bytes; the last tenth is held out."""

    def __init__(self, seed: int) -> None:
        data = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
        tokens = torch.tensor(list(data))
        cut = len(tokens) * 9 // 10
        self._train, self._held = tokens[:cut], tokens[cut:]
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, *, is_held: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self._held if is_held else self._train
        places = torch.randint(len(tokens) - BLOCK - 1, (BATCH,), generator=self._generator)
        rows = torch.stack([tokens[at : at + BLOCK + 1] for at in places.tolist()])
        return rows[:, :-1], rows[:, 1:]


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Plain:
    """Accumulates its own batches until the target is full, like a script without peers."""

    def __init__(self, plain: torch.optim.Optimizer) -> None:
        self._plain, self._batches = plain, 0

    def step(self) -> None:
        self._batches += 1
        if self._batches * BATCH >= TARGET:
            for group in self._plain.param_groups:
                for parameter in group["params"]:
                    parameter.grad.div_(self._batches)
            self._plain.step()
            self._plain.zero_grad()
            self._batches = 0


def ours(stack: ExitStack, number: int, count: int, folder: str, plain: torch.optim.Optimizer) -> Any:
    from crypto.contact import parse_address
    from node import config
    from node.library.sync import sync

    address = hear()["address"]
    settings = config.Config(
        name=f"n{number}",
        data_dir=Path(folder) / str(number),
        swarm=config.SwarmSettings(name="benchmark", preset="host"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False, seeds=(parse_address(address),) if address else ()),
        resources=config.Resources(calibrate=False),  # calibration would disturb the measurement
    )
    me = stack.enter_context(sync(settings))
    say(address=me.addresses[0])
    me.wait_for_members(count - 1, JOINED_SECONDS)
    say(is_ready=True)
    hear()
    return me.optimizer(plain, "gpt", target_batch_size=TARGET, batch_size=BATCH)


def hivemind(stack: ExitStack, model: torch.nn.Module) -> Any:
    import hivemind as rival

    address = hear()["address"]
    dht = rival.DHT(
        initial_peers=[address] if address else [],
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_ipfs=False,
        use_relay=False,
        use_auto_relay=False,
        start=True,
    )
    stack.callback(dht.shutdown)
    say(address=str(dht.get_visible_maddrs()[0]))
    say(is_ready=True)
    hear()
    optimizer = rival.Optimizer(
        dht=dht,
        run_id="gpt",
        batch_size_per_step=BATCH,
        target_batch_size=TARGET,
        params=model.parameters(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, RATE),
        matchmaking_time=MATCHMAKING_SECONDS,
        averaging_timeout=30.0,
    )
    stack.callback(optimizer.shutdown)
    return optimizer


def main() -> None:
    """Train for the given time, and report the results."""
    kind, number, count, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, text = GPT(), Text(100 + number)
    plain = torch.optim.AdamW(model.parameters(), RATE)
    with ExitStack() as stack:
        if kind == "silent":
            hear()
            say(address="none")
            say(is_ready=True)
            hear()
            optimizer: Any = Plain(plain)
        elif kind == "ours":
            optimizer = ours(stack, number, count, folder, plain)
        else:
            optimizer = hivemind(stack, model)
        say(**train(kind, model, text, optimizer, hear()["seconds"]))
        hear()


def train(kind: str, model: torch.nn.Module, text: Text, optimizer: Any, seconds: float) -> dict[str, Any]:
    samples, inside, longest, blocked, lasted = 0, 0.0, 0.0, 0.0, 0.0
    begun = time.perf_counter()
    while True:
        loss_of(model, text.batch()).backward()  # type: ignore[no-untyped-call]  # torch's
        now = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        if ended - begun > seconds:  # the last step may wait for peers that have stopped
            break
        samples, lasted = samples + BATCH, ended - begun
        inside, longest = inside + ended - now, max(longest, ended - now)
        if kind == "ours":
            optimizer.zero_grad()
            blocked = optimizer.stats.blocked_seconds
    held = Text(7)
    with torch.no_grad():
        loss = (
            sum(float(loss_of(model, held.batch(is_held=True))) for _ in range(HELD_BATCHES)) / HELD_BATCHES
        )
    found = {
        "samples_per_second": samples / lasted,
        "in_step": inside / lasted,
        "longest": longest,
        "loss": loss,
    }
    if kind == "ours":
        stats = optimizer.stats
        found["blocked"] = blocked / lasted
        found["samples_per_second"] -= stats.samples_dropped / lasted
        found["steps"] = stats.global_step
    return found


if __name__ == "__main__":
    main()
