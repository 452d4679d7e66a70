"""The daemon: torchrun launch, rank 0's intake from RQ, the last rank's writes to storage."""
