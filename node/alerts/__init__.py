"""Alerts: conditions that need a person's attention, found in events and on this machine, and sent to the
user's choice."""
