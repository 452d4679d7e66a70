"""What to buy and what to change: the capacity model of a pipeline, plans made with it, and advice about measured runs.

Pure: no torch, no Redis, no terminal. docs/capacity.md has the formulas.
"""
