"""Formats counts and paces, and makes foreign text safe to print: file names, metadata, job fields, log lines."""

import unicodedata

#: Unicode categories that move the cursor, hide or reorder text, or cannot be encoded: controls, formats (including
#: bidi overrides), surrogates, and line and paragraph separators.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
#: Joiners of letters and emoji: formats that are harmless.
_JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    r"""Replace each character that could control a terminal by its escape, such as `\x1b`; the result is one line."""
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape", "surrogatepass").decode("ascii")
        if unicodedata.category(character) in _UNSAFE and character not in _JOINERS
        else character
        for character in text
    )


def count(number: int, thing: str) -> str:
    """Format a number of things with the right plural: 1 video, 1,064 videos."""
    return f"1 {thing}" if number == 1 else f"{number:,} {thing}s"


def pace(videos_per_hour: float) -> str:
    """Format a number of videos an hour: 4.2 videos an hour, 1,064 videos an hour."""
    return (
        f"{videos_per_hour:,.0f} videos an hour" if videos_per_hour >= 10 else f"{videos_per_hour:.1f} videos an hour"
    )
