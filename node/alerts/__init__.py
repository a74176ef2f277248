"""Alerts: conditions that need a person's attention, found in events and on this machine, and sent by the
means that the user has chosen."""
