"""Capacity planning: the capacity model of a pipeline, plans made with it, and advice about measured runs.

Knows no torch, no Redis and no terminal. The capacity model is pure; `recordings` reads files of measured runs and
`chart` draws. docs/internals/capacity.md has the formulas.
"""
