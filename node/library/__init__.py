"""The library: a node's interface for programs, in an async form (`Node` itself) and in a blocking form."""
