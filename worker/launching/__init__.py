"""`svdq worker` itself: groups of ranks as processes, their scheduler, and their end. Imports no torch."""
