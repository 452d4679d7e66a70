"""How a number of bytes reads in a sentence."""


def size_text(num_bytes: int) -> str:
    """Write a number of bytes for people, with a digit after the point."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
