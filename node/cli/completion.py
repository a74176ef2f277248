"""`completion SHELL`: a script with which a shell completes commands and flags of peerloom.

The script is static and generated from the commands themselves, so pressing Tab starts no process of ours. If
no command can follow, and after a flag that takes a value, the shell completes files. Sources: bash(1)
"Programmable Completion", zshcompsys(1), fish's complete(1).
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from node.errors import UsageError
from node.suggest import did_you_mean

PROGRAM = "peerloom"
STARTS_NODES = (f"{PROGRAM} autostart install",)
"""Commands that also accept the flags of a node."""


@dataclass(frozen=True)
class Words:
    """Words that may follow a command: commands and flags with their help, and which flags take a value."""

    commands: Mapping[str, str]
    flags: dict[str, str]
    valued: frozenset[str]


def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="For this shell.")],
) -> None:
    """Print a script with which a shell completes commands and flags. The shell's start file must evaluate
    it."""
    if shell not in SCRIPTS:
        raise UsageError(f"completion {shell}{did_you_mean(shell, list(SCRIPTS))}", ", ".join(SCRIPTS))
    tree = dict(_tree(PROGRAM, context.find_root().command))
    for path in STARTS_NODES:
        flags, valued = tree[PROGRAM].flags | tree[path].flags, tree[PROGRAM].valued | tree[path].valued
        tree[path] = replace(tree[path], flags=flags, valued=valued)
    sys.stdout.write("\n".join(SCRIPTS[shell](tree)) + "\n")


def _tree(path: str, command: Any) -> Iterator[tuple[str, Words]]:
    below = {name: each for name, each in getattr(command, "commands", {}).items() if not each.hidden}
    flags, valued = {"--help": "Show what there is to say."}, set()
    for parameter in command.params:
        if parameter.param_type_name != "option" or parameter.hidden:
            continue
        for name in (*parameter.opts, *parameter.secondary_opts):
            flags[name] = parameter.help or ""
            if not (parameter.is_flag or parameter.count):
                valued.add(name)
    helps = {name: each.get_short_help_str(60) for name, each in below.items()}
    yield path, Words(helps, flags, frozenset(valued))
    for name, each in below.items():
        yield from _tree(f"{path} {name}", each)


def _bash(tree: Mapping[str, Words]) -> Iterator[str]:
    valued = sorted(set().union(*(words.valued for words in tree.values())))
    yield "_peerloom() {"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" at=peerloom commands="" flags="" each'
    yield "    COMPREPLY=()"
    yield '    case "${COMP_WORDS[COMP_CWORD-1]}" in'
    yield f"        {'|'.join(valued)}) return ;;"
    yield "    esac"
    yield '    for each in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield '        case "$at $each" in'
    yield f'            {"|".join(_quoted(path) for path in tree if path != PROGRAM)}) at="$at $each" ;;'
    yield "        esac"
    yield "    done"
    yield '    case "$at" in'
    for path, words in tree.items():
        told = f'commands="{" ".join(words.commands)}" flags="{" ".join(words.flags)}"'
        yield f"        {_quoted(path)}) {told} ;;"
    yield "    esac"
    yield '    case "$word" in'
    yield '        -*) COMPREPLY=($(compgen -W "$flags" -- "$word")) ;;'
    yield '        *) COMPREPLY=($(compgen -W "$commands" -- "$word")) ;;'
    yield "    esac"
    yield "}"
    yield "complete -o default -F _peerloom peerloom"


def _zsh(tree: Mapping[str, Words]) -> Iterator[str]:
    yield "autoload -Uz compinit bashcompinit"
    yield "(( $+functions[compdef] )) || compinit"
    yield "bashcompinit"
    yield from _bash(tree)


def _fish(tree: Mapping[str, Words]) -> Iterator[str]:
    yield "function __peerloom_is_at"
    yield "    set -l at peerloom"
    yield "    for each in (commandline -opc)[2..-1]"
    yield '        switch "$at $each"'
    yield f"            case {' '.join(_quoted(path) for path in tree if path != PROGRAM)}"
    yield '                set at "$at $each"'
    yield "        end"
    yield "    end"
    yield '    test "$at" = "$argv[1]"'
    yield "end"
    for path, words in tree.items():
        here = f"complete -c peerloom -n '__peerloom_is_at \"{path}\"'"
        for name, text in words.commands.items():
            yield f"{here} -f -a {name} -d {_quoted(text)}"
        for name, text in words.flags.items():
            kind = "-l" if name.startswith("--") else "-s"
            value = " -r" if name in words.valued else ""
            yield f"{here} {kind} {name.lstrip('-')}{value} -d {_quoted(text)}"


def _quoted(text: str) -> str:
    """Return a text in single quotes: a path for any shell; or help for fish, with its quotes escaped."""
    return "'" + text.replace("\\", "").replace("`", "").replace("'", "\\'") + "'"


SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""The function that writes each shell's script."""
