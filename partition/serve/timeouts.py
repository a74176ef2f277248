"""How long the parts of serving wait for each other."""

ALIVE_SECONDS = 0.2
"""How often two nodes that share a session say that they run: four may be late or lost before the first
counts as silent."""
SILENCE_SECONDS_MAX = 1.0
"""A provider whose node says nothing for so long is given up by the door, and its session goes on elsewhere.
A computation may take longer: the node goes on saying that it runs."""
OPEN_SECONDS_MAX = 3.0
"""From the first message to a provider to its answer, including the time to connect."""
ANSWER_SECONDS_MAX = 60.0
"""A unit whose answer takes so long, though all nodes say that they run, is sent over another route: a
machine that takes a minute for a chunk is of no use."""
DOOR_SILENCE_SECONDS_MAX = 10.0
"""A door that says nothing for so long loses its sessions. Longer than a provider's silence, for nobody waits
for a door."""
STALL_SECONDS = 0.5
"""A core that was not called for this long was itself suspended, and others' messages wait to be read."""
ROUTE_SECONDS_MAX = 30.0
"""How long a session waits for a provider of every stage: a machine that first has to load a stage takes some
10 s."""
LOADING_SECONDS_MAX = 180.0
"""How long it waits where a member says that it is loading the stage: large weights, or a busy machine."""
RETRY_SECONDS = 0.5
"""Before a provider that had no room, or failed, is asked again."""
LEAVE_SECONDS_MAX = 8.0
"""How long a leaving node waits for another to answer for its stage; a user waits for it to stop."""
