"""Alerts: what a person should look at, found in events and on this machine, and told where they want it."""
