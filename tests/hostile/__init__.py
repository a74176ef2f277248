"""A hostile client and what it is let loose on, each in processes of its own: for a test and a benchmark.

    attack        what all attacks have in common: a target, a rate, a strike
    packets       attacks by datagram
    visitors      attacks on connections, by strangers without an identity
    guests        attacks on connections, by peers who shake hands as they should, and then do not behave
    client        the process that lets them loose
    victim        the process that is attacked: a whole node, and a service that it owes to everybody
    honest        the process that asks for that service all the time, and counts
    scene         starts them all, ends them all, and measures

All traffic stays on loopback.
"""
