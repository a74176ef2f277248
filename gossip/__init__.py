"""SWIM membership and the all-reduce of a group, as pure state machines."""
