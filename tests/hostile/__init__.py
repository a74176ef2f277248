"""A hostile client and what it is let loose on, each in processes of its own: for a test and a benchmark.

    attack        what all attacks have in common: a target, a rate, a strike
    packets       attacks by datagram
    visitors      attacks on connections, by strangers without an identity
    guests        attacks on connections, by peers who shake hands as they should, and then do not behave
    client        the process that lets them loose
    victim        the process that is attacked: a whole node, and a service that it owes to everybody
    honest        the process that asks for that service all the time, and counts
    scene         starts them all, ends them all, and measures

And a hostile member of the swarm, which says everything that any protocol knows:

    wire          all that can be said: protocols, messages, what is signed
    known         what it has learnt of the live swarm
    values        hostile values for every message, made from its struct
    insider       its mouth, and a network that lies
    own_run       runs that it asks for itself
    virtual       beside the whole nodes of tests.stack, in virtual time
    insider_process, watched, loop_steps, member_scene
                  the same with real nodes in processes of their own: what they use, how long loops stand

And in a named run of averaging:

    participant   a member that lies about its step, its samples and its state

All traffic stays on loopback.
"""
