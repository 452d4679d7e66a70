"""Rank 0's source: jobs off the queue, made ready for the stage, and reported on."""
