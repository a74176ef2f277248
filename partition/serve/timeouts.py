"""How long the parts of serving wait for each other."""

ALIVE_SECONDS = 0.2
"""Seconds between two signs of life of nodes that share a session. Four may be late or lost before the sender
counts as silent."""
SILENCE_SECONDS_MAX = 1.0
"""How long a provider's node may be silent before the door (the node that asks) gives it up and continues its
session elsewhere. A computation may take longer, because the node continues to send signs of life."""
OPEN_SECONDS_MAX = 3.0
"""Maximum time from the first message to a provider until its answer, including the time to connect."""
ANSWER_SECONDS_MAX = 60.0
"""How long a unit's answer may take before the unit is sent over another route, although all nodes report
that they are running. A machine that takes a minute for a chunk is of no use."""
DOOR_SILENCE_SECONDS_MAX = 10.0
"""How long a door may be silent before it loses its sessions. It is longer than a provider's silence, because
nobody waits for a door."""
STALL_SECONDS = 0.5
"""If a core was not called for this long, it was itself suspended, and others' messages may be unread."""
ROUTE_SECONDS_MAX = 30.0
"""How long a session waits for a provider of every stage. A machine that must first load a stage takes about
10 s."""
LOADING_SECONDS_MAX = 180.0
"""How long a session waits if a member reports that it is loading the stage. Weights may be large, or the
machine busy."""
RETRY_SECONDS = 0.5
"""How long to wait before a provider that had no room, or that failed, is asked again."""
LEAVE_SECONDS_MAX = 8.0
"""How long a leaving node waits for another node to answer for its stage. A user is waiting for the node to
stop."""
