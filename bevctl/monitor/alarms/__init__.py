"""Alarms: one file a family. To add one: a rule, its line in `table.ALARMS`, its text in bevctl/explain/alarms.yaml."""
