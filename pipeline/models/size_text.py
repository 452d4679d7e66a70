"""Formats a number of bytes."""


def size_text(num_bytes: int) -> str:
    """Format a number of bytes with one decimal."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
