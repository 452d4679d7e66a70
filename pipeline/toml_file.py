"""Parses TOML of strangers: its size and depth, and so the time of tomllib, are bounded before."""

import re
from typing import Any, Final

MAX_BYTES: Final = 1 << 16
#: Of lists and tables in each other, and parts of a dotted key, for which tomllib takes their square.
MAX_DEPTH: Final = 32
_STRING = r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\''
_STRINGS_AND_COMMENTS: Final = re.compile(rf"(?P<string>{_STRING})|#[^\n]*", re.DOTALL)
_AROUND_KEYS: Final = re.compile(r"[^\w\-. \t]")


def parse_toml(data: bytes) -> dict[str, Any]:
    """Parse a file of at most `MAX_BYTES`; raises ValueError, whose text is a clause."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
    text = data.decode()
    bare = _STRINGS_AND_COMMENTS.sub(lambda found: "_" if found["string"] else "", text)
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", bare):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
    if any(part.count(".") > MAX_DEPTH for part in _AROUND_KEYS.split(bare)):
        raise ValueError("it is nested too deeply")
    import tomllib  # compiles its patterns: here, as most commands parse no file

    return tomllib.loads(text)
