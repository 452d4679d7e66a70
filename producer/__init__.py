"""Jobs and the queue: job model, settings, queue, storage, submission and status. Never imports torch."""
