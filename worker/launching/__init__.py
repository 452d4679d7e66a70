"""`svdq worker` itself: groups of ranks as processes, and their end. Imports no torch."""
