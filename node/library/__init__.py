"""The library: what a program may ask of a node, in an async form (`Node` itself) and in a blocking one."""
