"""Without running a node, plan which peers would hold which layers, and show the effect of other machines.

python examples/plan.py                          # the built-in gpt on the machines of examples/peers.toml
python examples/plan.py FOLDER peers.toml        # a Hugging Face folder on your own machines
"""

import sys
from pathlib import Path

import node
from node.planning.request import graph_of

PEERS = Path(__file__).with_name("peers.toml")


def main(model: str = "gpt", peers: str | Path = PEERS) -> None:
    """Print a plan, draw it, and compare it with some changes."""
    graph = graph_of(model)  # captured once; `node.plan` also accepts a model's name
    report = node.plan(graph, peers, batch=64)
    print(report.explain())
    Path("plan.svg").write_text(report.to_svg(), encoding="utf-8")
    print(f"\n{report.predicted.samples_per_second:.3g} samples a second; drawn into plan.svg")
    for changes in (["lose=lab-3"], ["add=8GB@50GFLOPS@1Gbit"], ["lose=lab-3", "link=lab-1:mbp@1Gbit"]):
        other = node.plan(graph, peers, batch=64, what_if=changes)
        assert other.what_if_gain is not None
        print(f"{' and '.join(changes)}: {other.what_if_gain * 100:+.0f} %")


if __name__ == "__main__":
    main(*sys.argv[1:])
