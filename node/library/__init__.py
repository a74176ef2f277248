"""The library: a node's interface for programs, in an async form (`Node` itself) and a blocking one."""
