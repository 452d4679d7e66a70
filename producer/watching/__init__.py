"""Watches a folder and submits the photos that are dropped into it, each once."""
