"""Runs the Lua scripts in redis_scripts/, each as one step of Redis; their heads say what they take and return."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import redis

from svdq.producer import keys

_SHARED = ("add_event", "execute", "take_turns")  # functions that several scripts call
#: By name. Read with this module: a script of a newer version, installed meanwhile, may take other arguments.
_TEXTS = {path.stem: path.read_text("utf-8") for path in Path(__file__).with_name("redis_scripts").glob("*.lua")}


@cache
def source(name: str) -> str:
    """Return a script without the comments at its head, with the prefixes of the keys that it names itself."""
    text = "\n".join(line for line in _TEXTS[name].splitlines() if not line.startswith("--"))
    text = text.replace("'svdq:", f"'{keys.PREFIX}").replace("'rq:", f"'{keys.RQ}:")
    called = [source(each) for each in _SHARED if name not in _SHARED and f"{each}(" in text]
    return "\n".join([*called, text])


def run(connection: redis.Redis, name: str, names: Sequence[bytes | str], *values: Any) -> Any:
    """Run a script with the keys `names` and other arguments; in a pipeline, with its other commands."""
    return connection.eval(source(name), len(names), *names, *values)
