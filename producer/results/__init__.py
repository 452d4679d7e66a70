"""Finished videos: find, fetch, show and remove them; the report of a run."""
