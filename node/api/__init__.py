"""The node's interface for programs: `Node` inherits it, `node/library` has its blocking form."""
