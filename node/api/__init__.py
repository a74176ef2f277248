"""What a program may ask of a node: `Node` itself inherits it, `node/library` has its blocking form."""
