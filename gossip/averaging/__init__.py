"""Averaging in small groups, without a coordinator: sans-IO cores and numpy, nothing of torch or sockets.

| module | what |
|---|---|
| group | `Group`: everything that the members of one attempt agree on; its hash is the attempt's name |
| messages | the wire: every message, its limits, `PROTOCOL`, `MESSAGE_BYTES_MAX` |
| attempt | `Attempt`: one all-reduce that survives its members |
| outcome | `Averaged`, `Failed`, `Patience` |
| reduction | from several parts to one: `weighted_mean`, and the interface that robust rules share |
| codecs | how a chunk is written down |

How a shell drives an attempt:

    attempt = Attempt(signer, group, vector, weight, now, patience)
    send(attempt.start(now))
    # on a message, already decoded with `decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)`:
    send(attempt.receive(now, sender, message))     # RemoteProtocolError: count it and drop the message
    # at attempt.deadline:
    send(attempt.wake(now))
    # a stream broke, or membership calls the peer dead:
    send(attempt.lost(now, peer))
    # one task for each peer, whenever the stream takes more:
    if peer in attempt.ready: send(attempt.pull(now, peer))

`send` takes a list of (peer, message), which may name any member. Messages to one peer go in order. The data
of a chunk is a view: encode it before the next call into the core, and never write to the bytes a message was
decoded from. Once `result` is set, it stays; keep on driving until `is_closed`, since others may miss what
this member holds. `vector` must not change before there is a result: average a copy, and the training loop
goes on meanwhile. A call takes at most the time to code or reduce one chunk, but for `pull` of a last chunk
and `wake`, which may have to finish a part: call them where computing is allowed.
"""
