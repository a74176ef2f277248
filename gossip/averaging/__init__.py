"""Averaging in small groups, without a coordinator: sans-IO cores and numpy, without torch or sockets.

| module | what |
|---|---|
| group | `Group`: everything that the members of one attempt agree on; its hash is the attempt's name |
| messages | the wire: every message, its limits, `PROTOCOL`, `MESSAGE_BYTES_MAX` |
| attempt | `Attempt`: one all-reduce that survives its members; parts, scatter and gather belong to it |
| outcome | `Averaged`, `Failed`, `Patience` |
| grid | Moshpit's grid: who averages with whom in which round |
| walk | `GridWalk`: one peer's way over the grid, by which nodes form their groups |
| catalogue | the strategies by name |
| strategies | what peers do between rounds: each paper's arithmetic in one small class |
| feedback | error feedback for lossy codecs |
| attendance, lateness | which peers are waited for, and how long, judged by this peer's own experience |
| pace | adaptive deadlines: from measured attempts to a `Patience` |
| tensors | `Layout`: named tensors to one vector and back, and the signature that names them |
| reduction | from several parts to one: `weighted_mean`, and the interface that all rules share |
| aggregates | the rules that a group may agree on: the mean, and those of `robust` |
| robust | rules that survive members who lie, a file each |
| weights | `bounded_weights`: how much each claimed weight counts |
| codecs | the encodings of a chunk |

The following code shows how a caller drives an attempt, once `gossip.matchmaking` has formed its group. If
the attempt fails, the remaining members form a new group (`node.averaging.participation`):

    layout = layout_of(tensors)
    terms = Terms("butterfly", "float32", layout.signature, layout.items, layout.dtype)
    vector = layout.flatten(tensors)
    core = Attempt(signer, group, vector, weight, now, pace.patience(size_bytes))
    send(core.start(now))
    # on a message, already decoded with `decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)`:
    send(core.receive(now, sender, message))     # RemoteProtocolError: count it and drop the message
    # at core.deadline:
    send(core.wake(now))
    # a stream broke, or membership calls the peer dead:
    send(core.lost(now, peer))
    # one task for each peer, whenever the stream takes more:
    if peer in core.ready: send(core.pull(now, peer))
    # once core.result is set: Averaged, or Failed with a reason
    layout.unflatten(result.vector, tensors)

`send` takes a list of (peer, message), which may name any member. Messages to one peer go in order. Each
message names its attempt, so a caller with several attempts can find the right one; it need not answer a
message of an unknown attempt. The data of a chunk is a view: encode it before the next call into the core,
and never write to the bytes from which a message was decoded. Once `result` is set, it stays. Continue to
drive the attempt until `is_closed`, because other members may lack what this member holds. `vector` must not
change before there is a result: average a copy, so that the training loop can continue meanwhile.

Most calls take at most the time to code or reduce one chunk. There are three exceptions: `pull` of the last
chunk and `wake`, which may have to finish a part, and an exchange, which is reduced in one call. Call these
in a thread that may compute.
"""
