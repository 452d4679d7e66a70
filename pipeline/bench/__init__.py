"""Measuring the pipeline: a run, its figures, and its timeline."""
