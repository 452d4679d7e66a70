"""Measures the pipeline: a run, its figures, and its timeline."""
