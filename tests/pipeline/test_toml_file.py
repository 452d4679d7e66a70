"""TOML of strangers: what takes tomllib long, or more stack than there is, is refused before it is parsed."""

import time

import pytest

from svdq.pipeline.toml_file import MAX_BYTES, parse_toml


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 30_000) + " = 1",
        "[" + " . ".join(['"a"', "'b'"] * 8_000) + "]",
        "a = {" + ".".join(["a"] * 1_000) + " = 1}",
        "a = " + "[" * 20_000 + "]" * 20_000,
        "a = " + "{a = " * 10_000 + "1" + "}" * 10_000,
        'a = "' + "x" * MAX_BYTES + '"',
        "a = '''" + '"' * 50_000 + ".".join("b" * 5_000),
        '"""' * 20_000,
        "a" * 60_000,
        "\n".join(".".join(f"a{line}_{part}" for part in range(32)) + " = 1" for line in range(200)) + "\na = ",
    ],
    ids=range(10),
)
def test_hostile(text: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=r".+"):
        parse_toml(text.encode())
    assert time.monotonic() - started < 1


def test_texts_and_comments_may_have_dots_and_brackets() -> None:
    dots = ".".join("abc" * 50)
    text = f'# {dots} {"[" * 99}\nprompt = "a \\" {dots} {"[{" * 99}"\nsize."a.b" = 1.5\n'
    text += f'output = \'{dots}\'\nmore = """\n{dots}\n{"[" * 99}"""\nratios = [{"0.5, " * 2000}]\n'
    found = parse_toml(text.encode())
    assert found["size"] == {"a.b": 1.5}
    assert found["prompt"].endswith("[{")
    assert len(found["ratios"]) == 2000
