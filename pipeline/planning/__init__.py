"""Capacity planning: the law of a pipeline's pace, and plans made with it.

Pure code without torch, Redis and a terminal. docs/internals/capacity.md has
the formulas.
"""
