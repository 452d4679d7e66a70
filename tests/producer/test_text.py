"""Foreign text is printed without its control characters."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdq.producer.text import printable


@given(st.text(st.characters()))  # surrogates included
def test_no_text_controls_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
    assert printable(shown) == shown
    assert len(shown.splitlines()) <= 1
    shown.encode()


@pytest.mark.parametrize("text", ["Straße 5.jpg", "日本語", "a\u00a0b", "👩\u200d👧", "back\\slash"])
def test_plain_text_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b2J", r"\x9b2J"),
        ("a\nb\tc\x7f", r"a\nb\tc\x7f"),
        ("gpj\u202egpj.exe", r"gpj\u202egpj.exe"),
        ("\udcff", r"\udcff"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_the_rest_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert printable(text) == shown
