"""What came of it: finished videos found, fetched, opened, shown and removed; the report of a run."""
