"""The record, the progress and the log of a rank, and its watchdog."""
