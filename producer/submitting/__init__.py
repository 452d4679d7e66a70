"""Submission: find and check photos, read parameters, create jobs and enqueue them."""
