"""The laws of ARCHITECTURE.md that imports can break, checked in the source of every file."""

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from tests.source import PACKAGES, ROOT, Source, imports, modules, sources

# Law 3. Which of our packages each may import.
ALLOWED = {
    "crypto": {"crypto"},
    "dht": {"crypto", "dht"},
    "gossip": {"crypto", "gossip"},
    "partition": {"crypto", "partition"},
    "node": {"crypto", "dht", "gossip", "partition", "node"},
    "sim": {"crypto", "dht", "gossip", "partition", "node", "sim"},
}

# The floors (layers) inside node, lowest first: a file imports its own floor and those below.
FLOORS = (
    (
        "shadowing",
        "invocation",
        "counter_names",
        "errors",
        "events",
        "settings_events",
        "averaging_events",
        "serving_events",
        "result_events",
        "event_kinds",
        "eventlog",
        "history",
        "addresses",
        "config",
        "config_file",
        "offering",
        "quantities",
        "settings",
        "containment",
        "seams",
        "waker",
        "locks",
        "forks",
        "suggest",
        "text",
        "paths",
        "toml",
    ),
    ("documents", "state", "state_documents", "journal", "transport", "storage", "recording"),
    ("services", "planning", "protocols", "stages"),
    ("content",),
    ("placement",),
    ("checkpoints", "pipeline", "runs", "averaging", "local", "calibration", "serving"),
    (
        "control",
        "executor",
        "commands",
        "checkpoint_commands",
        "serving_commands",
        "requests",
        "run_requests",
        "portal",
        "api",
        "library",
        "optimizer",
        "service_settings",
        "own_machine",
        "joined_services",
        "parts",
        "runtime",
        "changing",
        "following",
        "alerts",
        "web",
        "process",
    ),
    ("cli", "demo", "doctor", "main", "child_node", "__main__"),
)

# Law 1. Imports forbidden in a pure core, which reaches the outside world only through the six seams.
IMPURE = {
    "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "io", "logging", "mmap", "multiprocessing",
    "os", "pathlib", "secrets", "select", "selectors", "shutil", "signal", "socket", "sqlite3", "ssl",
    "subprocess", "sys", "tempfile", "threading", "time", "trio", "uuid",
}  # fmt: skip

# Code that runs in a process of its own: it may import torch, and is not a core.
COMPUTING = {
    "partition/capture/": "the requester's side: from a module to a graph, in the command's own process",
    "partition/execute/": "the stage's side: admission and arithmetic, in the stage's process",
    "partition/calibrate/": "the calibration of a device, in a process that ends with it",
    "node/optimizer/": "the optimizer wrapper, in a user's own process",
    "partition/measure.py": "the measuring of an accelerator, in a process that ends with it",
}
# Modules that may import such code, inside a function, once they run in such a process.
COMPUTERS = {
    "node.stages.process": "the stage's process",
    "node.serving.proof_process": "the proof of a graph before it is served, in a process that ends with it",
    "node.library.sync": "me.optimizer, called by a script that has torch",
    "node.api.capturing": "me.train, called by a program that has torch",
    "node.cli.model": "the command `model`",
    "node.cli.capture": "the command `train`, which captures the model that it is given",
    "node.cli.predict_words": "the command `predict`, for models of text",
    "node.cli.predict": "the command `predict`, which runs a person's own model on their own machine",
}

# Law 6. No node runs code of other peers.
UNPICKLERS = {"cloudpickle", "code", "codeop", "dill", "joblib", "marshal", "pickle", "runpy", "shelve"}
EVALUATORS = {"eval", "exec", "compile", "__import__"}
LOADERS = {"torch.load", "torch.export.load", "torch.jit.load"}
# Code that can name a file of code can also run that file.
IMPORTERS = {"import_module", "exec_module", "load_module", "run_path", "run_module"}
IMPORTING = {
    "partition/capture/": "a person's own file, on that person's machine, by their own command",
    "node/__init__.py": "the module's own names, when they are first used",
    "node/cli/sim.py": "the simulator, a layer above the node, under its one name",
}

PURE = tuple(
    source
    for source in sources("crypto", "dht", "gossip", "partition")
    if not source.place.startswith(tuple(COMPUTING))
)


@cache
def graph() -> dict[str, frozenset[str]]:
    """Return each of our modules with those of our modules that it imports, including imports for types
    alone."""
    return {
        source.module: frozenset(name for _, name in imports(source) if name in modules()) - {source.module}
        for source in sources(*PACKAGES)
    }


def floor(module: str) -> int:
    """Return the floor of a module of node."""
    room = module.split(".")[1]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


@cache
def calls(source: Source) -> list[tuple[int, str]]:
    """Return (line, dotted name) of everything that a file calls."""
    return [
        (node.lineno, ast.unparse(node.func))
        for node in source.each(ast.Call)
        if isinstance(node.func, ast.Name | ast.Attribute)
    ]


def test_packages_import_only_those_below_them_and_no_sibling() -> None:
    assert [
        f"{source.place}:{line} imports {name}"
        for source in sources(*PACKAGES)
        for line, name in imports(source)
        if (package := name.split(".")[0]) in {*PACKAGES, "tests"} and package not in ALLOWED[source.package]
    ] == []


def test_every_package_of_node_has_a_floor() -> None:
    rooms = {source.module.split(".")[1] for source in sources("node") if "." in source.module}
    assert rooms - {room for rooms in FLOORS for room in rooms} == set()


def test_the_architecture_lists_the_existing_floors_and_rooms() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert "\n".join("       " + " ".join(rooms) for rooms in FLOORS) in text
    rooms = {path.parent.name for package in PACKAGES for path in (ROOT / package).glob("*/__init__.py")}
    assert {room for room in rooms if not re.search(rf"^ .*\b{room}/ ", text, re.MULTILINE)} == set()


def test_rooms_of_node_import_only_their_floor_and_those_below() -> None:
    assert [
        f"{source.place}:{line} imports {name}"
        for source in sources("node")
        if "." in source.module
        for line, name in imports(source)
        if name.startswith("node.") and floor(name) > floor(source.module)
    ] == []


def test_no_modules_import_each_other_in_a_cycle() -> None:
    circle: list[str] = []
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
    assert circle == []


@cache
def places() -> dict[str, str]:
    """Return the path of each module's file."""
    return {source.module: source.place for source in sources(*PACKAGES)}


def room(module: str) -> str:
    """Return the folder of a module, or the module itself if it lies directly in a package."""
    folder = places()[module].rpartition("/")[0].replace("/", ".")
    return module if folder in PACKAGES else folder


def test_no_rooms_import_each_other_in_a_cycle() -> None:
    rooms: dict[str, set[str]] = {}
    for module, imported in graph().items():
        rooms.setdefault(room(module), set()).update(map(room, imported))
    circle: list[str] = []
    try:
        graphlib.TopologicalSorter({name: below - {name} for name, below in rooms.items()}).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
    assert circle == []


def test_cores_import_nothing_of_the_outside_world() -> None:
    assert [
        f"{source.place}:{line} imports {name}"
        for source in PURE
        for line, name in imports(source)
        if name.split(".")[0] in IMPURE
    ] == []


def test_cores_have_nothing_async() -> None:
    statements = ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith
    assert [f"{source.place}:{node.lineno}" for source in PURE for node in source.each(*statements)] == []
    assert [f"{source.place}:{node.lineno}" for source in PURE for node in source.each(ast.Await)] == []


OPEN_MATCHES = {
    "gossip/state_table.py": "a body about an incarnation is handled before the match",
    "gossip/swim.py": "gossip and member lists are learnt before the match, and need no answer",
    "partition/steps/committer.py": "messages that report no trouble are answered before the match",
    "partition/run/verdicts.py": "most events of a committer change nothing",
}
"""Cores in which a match deliberately omits some kinds."""


def test_a_match_over_message_kinds_in_a_core_is_exhaustive() -> None:
    """Each match must end in a wildcard, such as `assert_never`. Or each case must return and only an error
    may follow, so that mypy detects omitted kinds.
    """
    closed = {
        match
        for source in PURE
        for function in source.functions
        for match, after in zip(function.body, [*function.body[1:], None], strict=True)
        if isinstance(match, ast.Match) and (after is None or isinstance(after, ast.Raise))
        if all(isinstance(case.body[-1], ast.Return | ast.Raise) for case in match.cases)
    }
    found = {
        source.place
        for source in PURE
        for match in source.each(ast.Match)
        if all(isinstance(case.pattern, ast.MatchClass | ast.MatchOr) for case in match.cases)
        if match not in closed
    }
    assert found == set(OPEN_MATCHES)


def test_cores_take_their_rng_as_an_argument() -> None:
    wrong = []
    for source in PURE:
        # The type may be named. But the module's own functions share one hidden generator.
        for module in source.each(ast.Import):
            if any(alias.name == "random" for alias in module.names):
                wrong.append(f"{source.place}:{module.lineno} imports the module random")
        for node in source.each(ast.ImportFrom):
            if node.module == "random":
                wrong += [f"{source.place}:{node.lineno}" for alias in node.names if alias.name != "Random"]
        wrong += [
            f"{source.place}:{line} calls {name}"
            for line, name in calls(source)
            if name == "Random" or name.startswith(("np.random.", "numpy.random."))
        ]
    assert wrong == []


def test_cores_never_iterate_over_a_set() -> None:
    # The order of a set depends on the hash seed of the process; what a core sends must not.
    assert [
        f"{source.place}:{iterated.lineno} {ast.unparse(iterated)}"
        for source in PURE
        for iterated in (
            *[node.iter for node in source.each(ast.For)],
            *[node.iter for node in source.each(ast.comprehension)],
        )
        if is_a_set(iterated)
    ] == []


def is_a_set(node: ast.expr) -> bool:
    """Return whether an expression is evidently a set."""
    called = isinstance(node, ast.Call) and ast.unparse(node.func) in ("set", "frozenset")
    return called or isinstance(node, ast.Set | ast.SetComp)


def test_cores_have_no_mutable_globals() -> None:
    assert [f"{source.place}:{node.lineno}" for source in PURE for node in source.each(ast.Global)] == []


def test_cores_neither_print_nor_open_files() -> None:
    assert [
        f"{source.place}:{line} calls {name}"
        for source in PURE
        for line, name in calls(source)
        if name in ("print", "open", "input")
    ] == []


TRIO_CLOCK = {
    "node/seams.py": "it is the clock seam",
    "node/stages/": "it stands behind the Executor seam, which the simulator implements differently",
    "node/transport/": "it stands behind the Network seam, which the simulator implements differently",
    "node/web/door.py": "the page's server is outside of the seams",
}
"""Files that read trio's clock themselves, and why they may."""


def test_the_node_reads_time_only_from_the_clock_seam() -> None:
    found = {
        source.place
        for source in sources("node")
        for node in source.each(ast.Attribute)
        if ast.unparse(node) == "trio.current_time" and node not in in_deadlines(source)
    }
    assert [place for place in sorted(found) if not place.startswith(tuple(TRIO_CLOCK))] == []
    assert [row for row in TRIO_CLOCK if not any(place.startswith(row) for place in found)] == []


def in_deadlines(source: Source) -> set[ast.AST]:
    """Return all expressions of deadlines of cancel scopes, which use trio's clock."""
    values = [
        node.value
        for node in source.each(ast.Assign)
        if any(isinstance(target, ast.Attribute) and target.attr == "deadline" for target in node.targets)
    ]
    return {part for value in values for part in ast.walk(value)}


def test_only_the_waker_and_the_driver_wake_cores() -> None:
    assert {
        source.place
        for source in sources("node")
        for _, name in calls(source)
        if name.rpartition(".")[2] == "wake"
    } == {"node/waker.py", "node/services/driver.py"}


def test_torch_is_imported_only_in_processes_of_their_own() -> None:
    assert [
        f"{source.place}:{line}"
        for source in sources(*PACKAGES)
        if not source.place.startswith(tuple(COMPUTING))
        for line, name in imports(source)
        if name.split(".")[0] in ("torch", "torchvision", "transformers")
    ] == []


def test_the_node_imports_no_computing() -> None:
    assert [
        f"{source.place}:{line} imports {name}"
        for source in sources("node", "sim")
        if source.module not in COMPUTERS and not is_computing(source.module)
        for line, name in imports(source)
        if is_computing(name) and (source.package == "node" or name.startswith("partition.capture"))
    ] == []


def is_computing(module: str) -> bool:
    """Return whether a module belongs to the part of `partition` that imports torch."""
    return f"{module.replace('.', '/')}/".startswith(
        tuple(place.removesuffix(".py").rstrip("/") + "/" for place in COMPUTING)
    )


def test_code_that_runs_graphs_of_others_never_imports_capture() -> None:
    assert [
        f"{source.place}:{line} imports {name}"
        for source in sources("partition")
        if not source.place.startswith("partition/capture/")
        for line, name in imports(source)
        if name.startswith("partition.capture")
    ] == []


def test_code_is_loaded_by_name_only_for_capture() -> None:
    assert [
        f"{source.place}:{line} calls {name}"
        for source in sources(*PACKAGES)
        if not source.place.startswith(tuple(IMPORTING))
        for line, name in calls(source)
        if name.split(".")[-1] in IMPORTERS
    ] == []


def test_nothing_unpickles_evaluates_or_compiles() -> None:
    everything = sources(*PACKAGES, "benchmarks", "examples")
    wrong = [
        f"{source.place}:{line} imports {name}"
        for source in everything
        for line, name in imports(source)
        if name.split(".")[0] in UNPICKLERS
    ]
    wrong += [
        f"{source.place}:{line} calls {name}"
        for source in everything
        for line, name in calls(source)
        if name in EVALUATORS | LOADERS
    ]
    assert wrong == []


def test_arrays_are_loaded_without_pickles() -> None:
    # numpy's default is safe too, but a reader should not need to know that.
    assert [
        f"{source.place}:{node.lineno}"
        for source in sources(*PACKAGES, "benchmarks", "examples")
        for node in source.each(ast.Call)
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in ("np.load", "numpy.load")
        if "allow_pickle=False" not in [ast.unparse(keyword) for keyword in node.keywords]
    ] == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("node", {"trio", "torch", "numpy"}),
        ("node.cli.client", {"trio", "torch", "numpy"}),
        ("node.runtime", {"torch"}),
        ("sim.engine", {"torch"}),
        ("sim.seams", {"torch"}),
    ],
)
def test_fast_entry_points_do_not_load_slow_modules(module: str, unwanted: set[str]) -> None:
    program = f"import sys, {module}; print(*[name for name in {sorted(unwanted)!r} if name in sys.modules])"
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert printed.stdout.split() == []


WHOLE_NODES = {"sim/worlds/stack.py", "sim/worlds/stages.py", "sim/worlds/submit.py"}
REPEATS = {
    "sim/worlds/autonat.py",
    "sim/worlds/cores.py",
    "sim/worlds/joining.py",
    "sim/worlds/punching.py",
    "sim/worlds/records.py",
    "sim/worlds/routed.py",
}
"""Worlds of bare cores that repeat connecting code of a node and say so; none of that code belongs to a
run."""


def test_simulated_runs_repeat_no_file_of_the_node() -> None:
    """`partition.run` defines a run's member. A docstring that names a file of node reveals a copy."""
    found = {
        source.place
        for source in sources("sim/worlds")
        for texts in (
            map(ast.get_docstring, source.each(ast.Module)),
            map(ast.get_docstring, source.each(ast.ClassDef)),
            map(ast.get_docstring, source.functions),
        )
        if any("`node." in (text or "") for text in texts)
    }
    assert found - WHOLE_NODES == REPEATS


# Public names that the program does not use itself, with the reason.
FOR_OTHERS = {
    "PeerOptimizer.stats": "the library: scripts read it",
    "PeerOptimizer.average_now": "the library: scripts call it",
    "PlanReport.to_json": "the library: programs set it",
    "PaxosChain.rejoin": "how a member returns after a fork; used by the walks over the chain of plans",
    "SimLinks.unblock": "a play's script in the simulator",
    "simulated_seams": "the seams of one node, for a play that is driven by hand",
    "Averaging.runners": "how far a node's attempts are, for plays that stop one in the middle",
    "Assets.script_bytes": "the limited size of the page's scripts",
    "INSTRUCTIONS_MAX": "the kernel's own limit on a filter, which the filter must keep",
}
# Names that a library calls.
CALLED_BY_NAME = {
    "_NoRedirect.redirect_request", "_Cooling.before_io_wait", "_Cooling.after_io_wait",
    "LogFile.handleError", "CommandGroup.format_commands",
    "_Context.save_for_backward", "_Context.save_for_forward", "_Context.mark_dirty",
    "_Context.mark_non_differentiable", "_Context.set_materialize_grads", "_DeferredCompiler.graph_break",
}  # fmt: skip


def test_public_names_are_used_by_the_program_itself() -> None:
    counts = Counter(
        word for source in sources(*PACKAGES) for word in re.findall(r"[A-Za-z_]\w*", source.text)
    )
    found = {
        name for source in sources(*PACKAGES) for name, word in _public_names(source) if counts[word] == 1
    }
    assert found - CALLED_BY_NAME - set(FOR_OTHERS) == set(), "public, but the program does not use it"
    assert (CALLED_BY_NAME | set(FOR_OTHERS)) - found == set(), "remove it from the list"


def _public_names(source: Source) -> Iterator[tuple[str, str]]:
    """Return the names that a module defines. Methods follow their class's name, and also appear alone."""
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not node.name.startswith("_") and not node.decorator_list:
                yield node.name, node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and not target.id.startswith("_"):
                    yield target.id, target.id
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name[0] != "_":
                    yield f"{node.name}.{method.name}", method.name
