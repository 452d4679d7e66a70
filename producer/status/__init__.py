"""Read-only views of jobs, queues and ranks, and estimates of when jobs will be done."""
