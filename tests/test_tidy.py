"""The habits of CONTRIBUTING.md that a machine can check; reviewers check the rest."""

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.source import PACKAGES, ROOT, SIDES, Source, sources

FILE_LINES_MAX = 600
"""The limit for any file. A file of 400 lines is already a reason to stop and think."""
EXPLAINED_FILE_LINES_MAX = 620
PRODUCT_FILE_LINES_MAX = 500
LONG_FILES = {
    "gossip/averaging/attempt.py",
    "gossip/state_table.py",
    "partition/run/member.py",
    "partition/steps/committer.py",
    "partition/steps/replica.py",
}
"""Files of the product that may be longer, each with its reason in a docstring. The list may only shrink."""
CLASS_LINES_MAX = 350
REASON = re.compile(r"\bLong because\s+\S")
"""Matches the reason that the docstring of a longer file or class of the product gives."""
FUNCTION_LINES_MAX = 60
TEST_FUNCTION_LINES_MAX = 90
"""Test functions may be longer, because a test may follow a long course of events."""
LONG_FUNCTIONS: dict[str, str] = {}
"""Functions of the product that may be longer, and why. The list may only shrink."""
LINE_LENGTH_MAX = 110
TEST_NAME_WORDS_MIN = 3
TEST_NAME_WORDS_MAX = 12
"""A reader must take a longer name apart before understanding it."""
PATCHES_MAX = 35
"""Maximum number of attributes that tests replace with pytest's monkeypatch. It may only shrink: a constant
that a test lowers should be a setting with a default, and a double should be passed in."""

FORBIDDEN_WORDS = {
    "master", "slave", "coordinator", "worker", "workers", "cluster", "clusters", "manager", "managers",
    "helper", "helpers", "util", "utils", "misc",
}  # fmt: skip
"""Words for parts that this project does not have, or that name nothing."""

UNMEASURED_WORDS = {
    "timeout", "timeouts", "interval", "delay", "duration", "ttl", "ms", "sec", "secs", "msec", "millis",
    "micros", "kb", "mb", "gb", "kib", "mib", "gib",
}  # fmt: skip
"""Words that leave a name's unit open at its end, or abbreviate the unit: use _seconds, _bytes instead."""

RIDDLES = re.compile(r"(Who|Whom|Whose|Of|So many|So much|So long|So often)\b")
"""A docstring must not begin with these: they do not name its subject."""

RELATIVES = {"what", "whatever", "who", "whoever", "whom", "whose", "of"}
"""Words with which no docstring (except "of") and no test's name may begin, because they do not name its
subject."""
SHARED_NAMES_MAX = 40
SHARED_NAMES = {
    "Applied": "a message of a stage's process, and one of a step, each named by what was applied",
    "Apply": "the same",
    "Averaged": "the core's outcome, and the simulator's event for it, whose name is in digests",
    "FetchState": "the simulator's message stands for the node's",
    "MemberChanged": "the core's event, and the node's event for it: `--json` and recordings name both",
    "MemberDegraded": "the same",
    "MemberLeft": "the same",
    "MemberRefuted": "the same",
    "MemberSuspected": "the same",
    "Node": "`node.Node` for programs is the daemon's node, with arguments for embedding",
    "Ping": "each of two protocols has its own",
    "RunEnded": "the node's event, and the simulator's, whose name is in digests",
    "Saved": "the simulator's message stands for the node's",
    "StepCommitted": "the node's event, and the simulator's, whose name is in digests",
    "Swarm": "a swarm, and a measure of a swarm, which experiments name",
    "Sync": "each of two protocols has its own",
}
"""Public class names that two or more modules use, and why. The list may only shrink."""

# Assembled here, so that this file does not contain the pattern.
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")))
PRAGMA = re.compile(r"  # (noqa|type: ignore|fmt:).*")
"""Comments for a tool, which may make a line longer, as ruff allows."""
PICTURE = re.compile("[\U0001f000-\U0001faff\u2600-\u26ff\ufe0f]")

EVERYTHING = sources(*PACKAGES, *SIDES)
PROGRAM = sources(*PACKAGES)


def words(name: str) -> list[str]:
    """Return the words of an identifier, in lower case: StageHost and stage_host are both stage, host."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def defined(source: Source, *, functions: bool = True) -> Iterator[tuple[int, str]]:
    """Return (line, name) of all names that a file defines; names imported from others are free.

    Without `functions`, return only names of values.
    """
    if functions:
        for function in source.functions:
            yield function.lineno, function.name
        for named in source.each(ast.ClassDef):
            yield named.lineno, named.name
    for argument in source.each(ast.arg):
        yield argument.lineno, argument.arg
    for variable in source.each(ast.Name):
        if isinstance(variable.ctx, ast.Store):
            yield variable.lineno, variable.id
    for attribute in source.each(ast.Attribute):
        if isinstance(attribute.ctx, ast.Store):
            yield attribute.lineno, attribute.attr
    for alias in source.each(ast.alias):
        if alias.asname is not None:
            yield alias.lineno, alias.asname


def called_name(node: ast.Call) -> str:
    """Return the last part of the name of a called function, "" if it has none."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def constants(source: Source) -> Iterator[tuple[int, str]]:
    """Return (line, name) of the constants of a module."""
    for node in source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id.isupper():
                yield node.lineno, target.id


def lines(source: Source) -> Iterator[tuple[int, str]]:
    yield from enumerate(source.text.splitlines(), start=1)


def dependencies() -> list[str]:
    """Return the packages that pyproject.toml requires, including extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(text for extra in extras for text in extra)]
    names = [match.group() for text in asked if (match := re.match(r"[A-Za-z0-9._-]+", text))]
    return [name for name in names if name != project["name"]]  # an extra may include another extra


def normal(name: str) -> str:
    """Return a package's name as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_file_opens_with_its_purpose() -> None:
    assert [
        source.place for source in EVERYTHING if source.text.strip() and not ast.get_docstring(source.tree)
    ] == []


def test_files_are_short_enough_to_be_understood_alone() -> None:
    lengths = {source.place: source.text.count("\n") for source in EVERYTHING}
    explained = {source.place for source in PROGRAM if REASON.search(source.text)}
    assert {
        place: length
        for place, length in lengths.items()
        if length > (EXPLAINED_FILE_LINES_MAX if place in explained else FILE_LINES_MAX)
    } == {}


def test_tests_replace_a_limited_number_of_attributes() -> None:
    name = "monkeypatch" + ".setattr"  # written in parts, so that this line is not counted
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    assert sum(text.count(name) for text in texts) <= PATCHES_MAX, "pass a setting or a double in"


def test_long_files_and_classes_give_a_reason() -> None:
    wrong = []
    for source in PROGRAM:
        classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
        long = [each for each in classes if (each.end_lineno or 0) - each.lineno >= CLASS_LINES_MAX]
        wrong += [f"{source.place} {each.name}" for each in long if not gives_reason(each)]
        is_long = source.text.count("\n") > PRODUCT_FILE_LINES_MAX
        if is_long and not (gives_reason(source.tree) or any(map(gives_reason, long))):
            wrong.append(source.place)
        # A file or class that is no longer long must not keep its reason.
        named = {each.name for each in classes if gives_reason(each)}
        wrong += [f"{source.place} {name}: short" for name in sorted(named - {each.name for each in long})]
        if gives_reason(source.tree) and not is_long:
            wrong.append(f"{source.place}: short")
    assert wrong == [], "split it, or write in its docstring: Long because ..."
    found = {source.place for source in PROGRAM if source.text.count("\n") > PRODUCT_FILE_LINES_MAX}
    assert found == LONG_FILES, "split it; if a file is short now, remove it from the list"


def gives_reason(node: ast.Module | ast.ClassDef) -> bool:
    return REASON.search(ast.get_docstring(node) or "") is not None


def test_docstrings_begin_with_their_subject_or_an_imperative() -> None:
    assert [
        f"{source.place}:{text.lineno} {text.value.value[:40]}"
        for source in PROGRAM
        for text in source.each(ast.Expr)
        if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        if RIDDLES.match(text.value.value.strip())
    ] == []


def is_indirect(source: Source) -> bool:
    """Return whether a docstring, or the name of a test, begins with a relative pronoun, or whether the name
    is too long."""
    for text in source.each(ast.Expr):
        if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            first = words((text.value.value.split() or [""])[0])
            if first[:1] and first[0] in RELATIVES - {"of"}:
                return True
    for test in source.functions:
        if test.name.startswith("test_"):
            name = words(test.name)[1:]
            if len(name) > TEST_NAME_WORDS_MAX or set(name[:1]) & RELATIVES:
                return True
    return False


def test_docstrings_and_test_names_begin_with_their_subject() -> None:
    found = [source.place for source in EVERYTHING if is_indirect(source)]
    assert found == [], "name the subject first, in at most twelve words for a test"


def test_a_public_class_has_a_unique_name() -> None:
    places: dict[str, set[str]] = {}
    for source in PROGRAM:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(source.module)
    shared = {name for name, modules in places.items() if len(modules) > 1}
    assert sorted(shared - SHARED_NAMES.keys()) == [], "rename it: one name means one thing"
    assert len(SHARED_NAMES) <= SHARED_NAMES_MAX
    assert sorted(SHARED_NAMES.keys() - shared) == [], (
        "no longer shared: remove it from the list, which may only shrink"
    )


def test_functions_are_short() -> None:
    program = {source.place for source in PROGRAM}
    long, found = [], set()
    for source in EVERYTHING:
        is_product = source.place in program
        bound = FUNCTION_LINES_MAX if is_product else TEST_FUNCTION_LINES_MAX
        for node in source.functions:
            name, length = f"{source.place} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1
            if length > bound and name in LONG_FUNCTIONS:
                found.add(name)
            elif length > bound:
                long.append(f"{source.place}:{node.lineno} {node.name}: {length}")
    assert long == [], "find the step that has a name, and extract it"
    assert found == LONG_FUNCTIONS.keys(), "short now: remove it from the list, which may only shrink"


def test_lines_are_short_and_end_cleanly() -> None:
    wrong = [
        f"{source.place}:{number}"
        for source in EVERYTHING
        for number, line in lines(source)
        if len(PRAGMA.sub("", line)) > LINE_LENGTH_MAX or line != line.rstrip() or "\t" in line
    ]
    wrong += [source.place for source in EVERYTHING if source.text and not source.text.endswith("\n")]
    assert wrong == []


def test_nothing_is_left_unfinished() -> None:
    assert [
        f"{source.place}:{number} {match.group()}"
        for source in EVERYTHING
        for number, line in lines(source)
        if (match := UNFINISHED.search(line))
    ] == []


def test_the_text_contains_no_emoji() -> None:
    assert [
        f"{source.place}:{number}"
        for source in EVERYTHING
        for number, line in lines(source)
        if PICTURE.search(line)
    ] == []


def test_no_error_is_silently_ignored() -> None:
    wrong = []
    for source in EVERYTHING:
        for handler in source.each(ast.ExceptHandler):
            caught = ast.unparse(handler.type) if handler.type else ""
            silent = all(isinstance(step, ast.Pass | ast.Continue) for step in handler.body)
            if not caught or (caught in ("Exception", "BaseException") and silent):
                wrong.append(f"{source.place}:{handler.lineno} except {caught}")
        for node in source.each(ast.Call):
            if called_name(node) == "suppress":
                caught_all = {ast.unparse(each) for each in node.args} & {"Exception", "BaseException"}
                wrong += [f"{source.place}:{node.lineno} suppress({name})" for name in sorted(caught_all)]
    assert wrong == []


def test_names_avoid_words_that_the_field_does_not_use() -> None:
    wrong = [
        f"{source.place}:{line} {name}"
        for source in EVERYTHING
        for line, name in defined(source)
        if FORBIDDEN_WORDS & set(words(name))
    ]
    wrong += [source.place for source in EVERYTHING if FORBIDDEN_WORDS & set(words(source.module))]
    assert wrong == []


def test_limits_are_constants_that_end_in_max_or_min() -> None:
    limits = {"max", "min", "maximum", "minimum", "limit", "limits"}
    assert [
        f"{source.place}:{line} {name}"
        for source in PROGRAM
        for line, name in constants(source)
        if limits & set(words(name)) and not name.endswith(("_MAX", "_MIN"))
    ] == []


def test_durations_and_sizes_say_their_unit() -> None:
    assert [
        f"{source.place}:{line} {name}"
        for source in PROGRAM
        for line, name in defined(source, functions=False)
        if words(name) and words(name)[-1] in UNMEASURED_WORDS
    ] == []


def patterns(source: Source) -> Iterator[tuple[int, str, bool]]:
    """Return (line, text, whether it belongs to a struct) of all regular expressions."""
    for node in source.each(ast.Call):
        if not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        called = ast.unparse(node.func)
        of_struct = [each.value for each in node.keywords if each.arg == "pattern"]
        given = node.args[:1] if called.startswith("re.") else of_struct if called.endswith("Meta") else []
        for part in given:
            texts = [each.value for each in ast.walk(part) if isinstance(each, ast.Constant)]
            yield node.lineno, "".join(text for text in texts if isinstance(text, str)), given is of_struct


def test_regular_expressions_anchor_the_end_of_the_text_not_of_lines() -> None:
    # `$` also matches before a trailing newline, and msgspec searches, so its patterns must anchor both ends.
    wrong = [
        f"{source.place}:{line} {text}"
        for source in PROGRAM
        for line, text, is_of_struct in patterns(source)
        if re.search(r"(?<!\\)\$", text)
        or (is_of_struct and not (text.startswith("^") and text.endswith("\\Z")))
    ]
    assert wrong == []


def test_structs_of_the_wire_are_frozen() -> None:
    assert [
        f"{source.place}:{node.lineno} {node.name}"
        for source in PROGRAM
        for node in source.each(ast.ClassDef)
        if "msgspec.Struct" in [ast.unparse(base) for base in node.bases]
        if "frozen=True" not in [ast.unparse(keyword) for keyword in node.keywords]
    ] == []


def test_a_check_is_silenced_by_name_and_with_a_reason() -> None:
    wrong = []
    for source in EVERYTHING:
        for number, line in lines(source):
            if "# type: ignore" in line and not re.search(r"# type: ignore\[[a-z-, ]+\]  # \S", line):
                wrong.append(f"{source.place}:{number}")
            if re.search(r"# noqa(?!: [A-Z]+[0-9]+)", line):
                wrong.append(f"{source.place}:{number}")
    assert [place for place in wrong if not place.startswith("tests/test_tidy.py")] == []


def test_test_names_are_sentences_and_tests_do_not_sleep() -> None:
    wrong = []
    for source in sources("tests"):
        for test in source.functions:
            if test.name.startswith("test_") and len(words(test.name)) < TEST_NAME_WORDS_MIN:
                wrong.append(f"{source.place}:{test.lineno} {test.name}")
        for node in source.each(ast.Call):
            if called_name(node) == "sleep" and ast.unparse(node.func) == "time.sleep":
                wrong.append(f"{source.place}:{node.lineno} time.sleep")
    assert wrong == []


def test_the_seven_packages_are_complete() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == {*PACKAGES, "tests"}


def test_every_folder_of_code_is_a_package() -> None:
    folders = {source.path.parent for source in sources(*PACKAGES, "tests")}
    assert [folder.name for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_no_console_script_shadows_another_program() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "node" not in project.get("scripts", {})


def test_every_dependency_is_pinned() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pinned = {normal(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==\S+", text, re.MULTILINE)}
    assert [name for name in dependencies() if normal(name) not in pinned] == []


def test_the_architecture_gives_a_purpose_for_each_dependency() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert [
        name for name in dependencies() if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
    ] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("StageHost", ["stage", "host"]),
        ("parse_HTTPHeader", ["parse", "http", "header"]),
        ("_SIZE_MAX2", ["size", "max", "2"]),
    ],
)
def test_words_are_found_in_names_of_any_case_style(name: str, expected: list[str]) -> None:
    assert words(name) == expected
