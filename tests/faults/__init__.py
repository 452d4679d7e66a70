"""Faults on purpose: real workers, a real Redis and real kills, to see that every job ends once and whole."""
