"""Capacity planning: the law of a pipeline's pace, plans made with it, and advice about measured runs.

Pure code without torch, Redis and a terminal, but for reading recordings and drawing. docs/internals/capacity.md has
the formulas.
"""
