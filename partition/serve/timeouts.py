"""How long the parts of serving wait for each other."""

ALIVE_SECONDS = 0.2
"""How often two nodes that share a session say that they run: four may be late or lost before the first
counts as silent."""
SILENCE_SECONDS_MAX = 1.0
"""A provider whose node says nothing for so long is given up by the door, and its session goes on elsewhere.
A computation may take longer: the node goes on saying that it runs."""
OPEN_SECONDS_MAX = 3.0
"""From the first word to a provider to its answer: a connection may have to be made first."""
ANSWER_SECONDS_MAX = 60.0
"""A unit whose answer takes so long, though all nodes say that they run, is sent over another route: a
machine that takes a minute for a chunk is of no use."""
DOOR_SILENCE_SECONDS_MAX = 10.0
"""A door that says nothing for so long loses its sessions. Longer than a provider's silence, for nobody waits
for a door."""
STALL_SECONDS = 0.5
"""A core that was not called for so long was asleep itself: what others said meanwhile waits to be read."""
ROUTE_SECONDS_MAX = 30.0
"""How long a session waits until every stage of its service has somebody who answers: a machine that has to
load a stage first takes some 10 s."""
LOADING_SECONDS_MAX = 180.0
"""How long it waits where a member says that it is loading the stage: large weights, or a busy machine."""
RETRY_SECONDS = 0.5
"""Before a provider that had no room, or failed, is asked again."""
LEAVE_SECONDS_MAX = 8.0
"""How long a node that leaves waits for another to answer for its stage: a person waits for it to go."""
