"""Assignment of parameters to the optimizer's groups, by patterns for their names. No torch."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from partition.model.graph import Graph, Parameter


def with_groups(graph: Graph, patterns: Sequence[Sequence[str]]) -> Graph:
    """Return the graph with every parameter assigned to the first group with a pattern that matches one of
    its names.

    Groups count from 1; parameters that match no pattern are in group 0. Raises ValueError if a pattern
    matches none.
    """
    used: set[str] = set()

    def grouped(parameter: Parameter) -> Parameter:
        for number, group in enumerate(patterns, start=1):
            hits = [each for each in group if any(fnmatchcase(name, each) for name in parameter.names)]
            used.update(hits)
            if hits:
                return msgspec.structs.replace(parameter, group=number)
        return msgspec.structs.replace(parameter, group=0)

    parameters = tuple(map(grouped, graph.parameters))
    for each in (each for group in patterns for each in group):
        if each not in used:
            raise ValueError(
                f"no parameter has a name like '{each}', or all of these are in an earlier group"
            )
    return msgspec.structs.replace(graph, parameters=parameters)
