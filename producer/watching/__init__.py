"""Watching a folder and submitting the photos that are dropped into it, each once."""
