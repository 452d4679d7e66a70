"""Checkpoints of videos that are half done: what is in one, where they are stored, who writes and who reads them."""
