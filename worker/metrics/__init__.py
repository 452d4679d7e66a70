"""Metrics for Prometheus, served by the launcher of a run, beside the ranks. Imports no torch."""
