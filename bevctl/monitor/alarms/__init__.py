"""Alarms: what each means and how it is decided. To add one, write a rule and give it a line in `table.ALARMS`."""
