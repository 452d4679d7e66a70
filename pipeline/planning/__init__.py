"""Capacity planning: the capacity model of a pipeline, plans made with it, and advice about measured runs.

Does not import torch. The capacity model is pure; `recordings` reads files of measured runs and `chart` draws.
docs/capacity.md has the formulas.
"""
