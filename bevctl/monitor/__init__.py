"""Watching a run: its state, its alarms, and how both are shown."""
