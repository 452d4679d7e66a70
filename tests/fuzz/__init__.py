"""Fuzzing of every reader of foreign data: `python -m tests.fuzz --seconds 3600 --seed 9`."""
