"""What is going on: jobs, queues, ranks, and when all will be done. Reads only."""
