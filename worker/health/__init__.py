"""The state of a rank: its record, progress, logs, metrics and crash marker, and the watchdog."""
