"""The last rank's sink: files of finished videos, written once and whole."""
