"""Network counters that count successful operations; all other counters count something refused or broken."""

TRAFFIC = frozenset(
    {
        "addresses_challenged", "beacons_heard", "beacons_sent", "channels_served", "circuits_carried",
        "connections_used_again", "cookies_sent", "cookies_shown", "datagrams_received", "datagrams_sent",
        "dial_backs", "initiations_sent", "link_probes_served", "links_measured", "messages_by_stream",
        "packets_sent", "paths_compared", "paths_direct", "paths_punched", "paths_relayed",
        "places_at_relays", "punched_tcp", "punched_udp", "punches_begun", "sessions_begun", "streams_opened",
        "streams_served",
    }
)  # fmt: skip
