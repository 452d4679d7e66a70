"""Makes foreign text safe to print: file names, metadata, job fields, log lines, error messages of libraries."""

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
    return "".join(_escaped(character) if _is_unsafe(character) else character for character in text)


def _is_unsafe(character: str) -> bool:
    return unicodedata.category(character) in _UNSAFE and character not in _JOINERS


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
