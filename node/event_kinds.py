"""All kinds of events by name, from `node.events` and the other modules of events."""

from node import averaging_events, events, result_events, serving_events, settings_events

EVENT_KINDS: dict[str, type[events.Event]] = {
    name: kind
    for module in (events, averaging_events, result_events, serving_events, settings_events)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, events.Event) and kind is not events.Event
}
