"""Checkpoints of unfinished videos: format, store, writer and reader."""
