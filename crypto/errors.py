"""The two protocol errors: ours and theirs (the habit of h11).

    ProtocolError
        LocalProtocolError     this program called an object in a state that forbids it: our bug
        RemoteProtocolError    a peer sent what no correct peer sends: it costs the peer, never us

A shell catches RemoteProtocolError, counts it and drops what came; it never shows a traceback for it.
"""


class ProtocolError(Exception):
    """Base of both; catch the subclasses."""


class LocalProtocolError(ProtocolError):
    """Our own code broke the rules of an object."""


class RemoteProtocolError(ProtocolError):
    """A peer broke the rules of a protocol."""
