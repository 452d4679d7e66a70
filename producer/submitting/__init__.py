"""From what a user asks for to jobs in the queue: photos found and checked, parameters read, jobs made and enqueued."""
