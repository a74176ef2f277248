"""The two protocol errors: our own mistakes and those of peers (the design of h11).

    ProtocolError
        LocalProtocolError     this program called an object in a state that forbids the call: our bug
        RemoteProtocolError    a peer sent what no correct peer sends: it costs the peer, never this node

The code that drives a protocol catches RemoteProtocolError, counts it and discards the input. It never shows
a traceback for it.
"""


class ProtocolError(Exception):
    """Base of both; catch the subclasses."""


class LocalProtocolError(ProtocolError):
    """Our own code broke the rules of an object."""


class RemoteProtocolError(ProtocolError):
    """A peer broke the rules of a protocol."""
