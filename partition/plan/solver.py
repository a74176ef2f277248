"""The solver: the best contiguous split of layers with replicas, or the reason why there is none.

Problems with a few peers are solved exhaustively. Those with tens of peers are searched
(`partition.plan.search`). With hundreds of peers, the fastest peers are given first to the weakest stage
(`partition.plan.spans`). If a search finds nothing that fits, `partition.plan.exact` decides for up to eight
peers. The answer depends only on the problem: not on a clock, a hash seed or the order of peers.
"""

from partition.plan.cuts import Cut, as_split, balanced
from partition.plan.exact import LAYERS_MAX, PEERS_MAX, ExactSearch
from partition.plan.forecast import forecast
from partition.plan.problem import Infeasible, Problem, Split
from partition.plan.search import EFFORT, EXHAUSTIVE_MAX, exhaustive, search
from partition.plan.spans import fill_stages
from partition.plan.tables import IMPOSSIBLE, Tables

SEARCHED_MAX = 64
"""Maximum number of peers for which a search is made. With more, stages are filled by a rule alone."""
PLAYED_MAX = 4
"""Maximum number of candidates whose step is simulated."""
EFFORT_PEERS = 12
"""Number of peers from which on the search evaluates fewer cuts, because each further peer makes a cut more
expensive."""


def solve(problem: Problem, tables: Tables | None = None) -> Split:
    """Return the best split found for a problem.

    Raises:
        Infeasible: there are too few peers or layers, or no split fits. It states what is missing.
    """
    _check(problem)
    tables = tables or Tables(problem)
    cuts, is_exact = _candidates(tables)
    if not cuts:
        raise _missing(problem, tables)
    splits = [as_split(tables, balanced(tables, cut), is_exact=is_exact) for cut in cuts[:PLAYED_MAX]]
    if problem.objective != "throughput" or problem.hides_links or len(splits) == 1:
        return splits[0]
    # Their scores are close. Only a simulation shows how a step really fills and drains the pipeline.
    steps = [forecast(problem, split, tables).step_nanoseconds for split in splits]
    return splits[steps.index(min(steps))]


def _candidates(tables: Tables) -> tuple[list[Cut], bool]:
    """Return the best cuts, by number of stages, and whether they are proved to be the best."""
    count = len(tables.problem.peers)
    if count <= EXHAUSTIVE_MAX:
        return exhaustive(tables), True
    filled = fill_stages(tables)
    if count > SEARCHED_MAX:
        return [filled] if filled else [], False
    found = search(tables, max(200, EFFORT * EFFORT_PEERS // max(EFFORT_PEERS, count)))
    if filled is not None:
        found = sorted([filled, *found], key=lambda cut: cut.order)
    if not found and count <= PEERS_MAX and tables.count <= LAYERS_MAX:
        sure = ExactSearch(tables).split(IMPOSSIBLE - 1)
        found = [] if sure is None else [sure]
    return found, False


def _check(problem: Problem) -> None:
    rules, layers, peers = problem.constraints, len(problem.layers), len(problem.peers)
    if not layers:
        raise Infeasible("the model has no layers")
    if rules.stages > layers:
        raise Infeasible(
            f"{rules.stages} stages are requested, but the model has only {layers} layers",
            do=f"request at most {layers} stages",
        )
    copies = max(1, rules.replicas or rules.replicas_min)
    wanted = max(1, rules.stages) * copies
    if wanted > peers:
        shape = f"{_counted(max(1, rules.stages), 'stage')} x {copies}"
        raise Infeasible(
            f"{_peers(wanted)} {'is' if wanted == 1 else 'are'} needed ({shape}), "
            f"{peers} {'offers' if peers == 1 else 'offer'} a slot",
            need=_peers(wanted),
            have=_peers(peers),
            do=f"add {_peers(wanted - peers)}"
            + (", or ask for fewer stages or replicas" if wanted > 1 else ""),
        )
    places = [
        position
        for position in range(1, layers)
        if not any(first < position < last for first, last in rules.together)
    ]
    if len(places) + 1 < rules.stages:
        raise Infeasible(
            (
                f"{rules.stages} stages are requested, but the model can be cut in only "
                f"{len(places)} places, because some layers must stay together"
            ),
            do=f"request at most {len(places) + 1} stages, or keep fewer layers together",
        )
    if sum(map(problem.may_cut, places)) + 1 < rules.stages:
        raise Infeasible(
            f"a micro-batch is too large to be sent between {rules.stages} stages; "
            "a smaller train.microbatch is needed",
            do="use a smaller train.microbatch, or fewer stages",
        )


def _missing(problem: Problem, tables: Tables) -> Infeasible:
    """Return an explanation why nothing fits: bytes needed, bytes offered, and what would help."""
    rules, layers = problem.constraints, tables.count
    bases = [peer.baseline_bytes for peer in problem.peers]
    base = min(bases)
    memory = tables.memory(1)
    verb = "train" if problem.trains else "serve"
    offers = [peer.memory_bytes for peer in problem.peers]
    largest = max(int(memory[first, first + 1]) for first in range(layers)) + base
    if largest > max(offers):
        return Infeasible(
            f"one layer alone needs {_gb(largest)} to {verb}, "
            f"the largest of {_peers(len(offers))} offers {_gb(max(offers))}",
            need=_gb(largest),
            have=_gb(max(offers)),
            do=_remedy(problem, largest - max(offers)),
        )
    copies = max(1, rules.replicas or rules.replicas_min)
    stages = max(1, rules.stages)
    need = copies * (int(memory[0, layers]) + stages * base)
    offer = sum(offers)
    if need > offer:
        peers = "1 peer offers" if len(offers) == 1 else f"{len(offers)} peers offer"
        return Infeasible(
            f"the model needs {_gb(need)} to {verb}, {peers} {_gb(offer)}",
            need=_gb(need),
            have=_gb(offer),
            do=_remedy(problem, need - offer),
        )
    cut = _counted(rules.stages, "stage") if rules.stages else "any number of stages"
    shape = f"{cut} x {_counted(rules.replicas, 'replica') if rules.replicas else 'any number of replicas'}"
    return Infeasible(
        f"no cut into {shape} fits the memory of {_peers(len(offers))}, though together they offer "
        f"{_gb(offer)} and the model needs {_gb(need)}",
        need=_gb(need),
        have=_gb(offer),
        do=_remedy(problem, need // 10),
    )


def _remedy(problem: Problem, missing: int) -> str:
    parameters = sum(layer.parameter_bytes for layer in problem.layers)
    ways = [f"free {_gb(missing)}", "add a peer"]
    if problem.trains and problem.moments:
        ways.append(f"--optimizer sgd (saves {_gb(problem.moments * parameters)})")
    if problem.trains and not problem.recompute:
        ways.append("recompute")
    return ", ".join(ways[:-1]) + f", or {ways[-1]}" if len(ways) > 1 else ways[0]


def _peers(count: int) -> str:
    return _counted(count, "peer")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
