"""Measures the pipeline: runs of a group and single parts of a model, their figures and plots."""
