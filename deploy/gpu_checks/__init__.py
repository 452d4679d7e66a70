"""The sections of `make gpu-check`."""
