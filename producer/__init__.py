"""What a job is and how it gets into the queue: job model, queue, storage, submit. Never imports torch."""
