"""A hostile client and its victim, each in processes of its own, for a test and a benchmark.

    attack        the base of all attacks: a target, a rate, a strike
    packets       attacks by datagram
    visitors      attacks on connections, by peers without an identity
    guests        attacks on connections, by peers that misbehave after a correct handshake
    client        the process that runs the attacks
    victim        the attacked process: a whole node, and a service that it must serve to everybody
    honest        the process that constantly requests that service, and counts the answers
    scene         starts all processes, ends them, and measures

And a hostile member of the swarm, which sends every message of every protocol:

    wire          all protocols, messages and signed bodies
    known         what the member has learnt of the live swarm
    values        hostile values for every message, made from its struct
    insider       sends the messages; also a network that lies
    own_run       runs that the member requests itself
    virtual       the member among the whole nodes of tests.stack, in virtual time
    insider_process, watched, loop_steps, member_scene
                  the same with real nodes in processes: their resources, and the steps of their loops

And in a named averaging run:

    participant   a member that lies about its step, its samples and its state

All traffic stays on loopback.
"""
