"""`svdq top`: the live view of queues, ranks and videos in flight."""
