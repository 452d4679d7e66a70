"""Makes invalid input out of valid input: of bytes, JSON, TOML and CSV."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

_DEEP = 2000
#: Replacements for a value in JSON, as text.
ODD_JSON = (
    *("null", "true", "false", "-1", "0", "0.5", "1e308", "1e999", "-0.0", "NaN", "-Infinity", str(2**63), str(2**31)),
    *(str(2**40), "9" * 400, "9" * 5000, '""', '" "', '"7"', r'"\ud800"', r'"\u0000"', r'"\u001b[31m"', '"../../x"'),
    *('"0001-01-01T00:00:00"', '"9999-12-31T23:59:59.999999Z"', '"2026-01-01"', '"1e999"', '"' + "x" * 10_000 + '"'),
    *("[]", "{}", "[[]]", "[null]", '[1, "a", {}]', '{"a": null}', "[" * _DEEP + "]" * _DEEP),
    '{"a":' * _DEEP + "1" + "}" * _DEEP,
)
#: Replacements for a value in TOML.
ODD_TOML = (
    *(
        "-1",
        "0",
        "true",
        "nan",
        "inf",
        "1e308",
        str(2**63),
        "9" * 400,
        "9" * 5000,
        '""',
        '"7"',
        r'"\u0000"',
        r'"\u001b"',
    ),
    *("1979-05-27", "0001-01-01T00:00:00", "9999-12-31T23:59:59Z", "07:32:00", "[]", "[[]]", '["mp4", 7]', "{}"),
    *("{a = 1}", "{a = {b = []}}", '"' + "x" * 100_000 + '"', "[" * _DEEP + "]" * _DEEP, "[" * _DEEP),
    *("{a=" * _DEEP + "1" + "}" * _DEEP, '"~nobody/x"', '"s3://"', '"redis://["', '"file://"', '"://"', '"[::1"', ""),
)
#: Replacements for a cell in CSV.
ODD_CELLS = (
    *(
        "",
        " ",
        "-1",
        "1e308",
        "nan",
        "inf",
        "9" * 400,
        "9" * 5000,
        "x" * 100_000,
        '"',
        '""',
        '"a\nb"',
        "\x00",
        "\x1b[31m",
    ),
    *(
        "٣",
        "1_0",
        "0x10",
        "576x320",
        "99999999x1",
        "../../x",
        "0001-01-01",
        "9999-12-31T23:59:59+14:00",
        "07:00",
        "{seed}",
    ),
    *("{", "{0}", "{stem.__class__}", "{seed:9999999999}", "mp4 gif mp4", "=1+1", "\ud7ff\ufeff", "😀" * 300),
)


def mutate_bytes(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Flip, insert, delete, truncate, duplicate, overwrite or splice, one to eight times."""
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        start = random.randrange(len(data) + 1)
        end = min(len(data), start + random.choice((1, 2, 4, 16, 256)))
        part = data[start:end]
        match random.randrange(8):
            case 0:
                part = bytes(byte ^ (1 << random.randrange(8)) for byte in part[:1]) + part[1:]
            case 1:
                part = random.randbytes(random.choice((1, 4, 64))) + part
            case 2:
                part = b""
            case 3:
                data, part, end = data[:start], b"", start
            case 4:
                part = part * random.choice((2, 3, 50))
            case 5:  # lengths
                value = random.choice((0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
                size = random.choice((2, 4, 8))
                number = (value % 2 ** (8 * size)).to_bytes(size, random.choice(("little", "big")))
                part, end = number, max(end, start + size)
            case 6:
                part = bytes(len(part)) if random.random() < 0.5 else b"\xff" * len(part)
            case 7 if others:
                other = random.choice(others)
                part, end = other[random.randrange(len(other) + 1) :], len(data)
        data = data[:start] + part + data[end:]
    return data


def mutate_json(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Replace, remove or repeat random nodes of a JSON document; one time in four mutate its bytes."""
    if random.random() < 0.25:
        return mutate_bytes(random, data, others)
    document = json.loads(data)
    raw: dict[str, str] = {}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        document = _mutate_node(random, document, raw)
    text = json.dumps(document)
    for place, value in raw.items():
        text = text.replace(f'"{place}"', value)
    return text.encode("utf-8", "surrogatepass")


def _mutate_node(random: Random, document: Any, raw: dict[str, str]) -> Any:
    places = list(_places(document))
    place = f"@{len(raw)}@"
    if not places or random.random() < 0.02:
        raw[place] = random.choice(ODD_JSON)
        return place
    parent, key = random.choice(places)
    match random.randrange(8):
        case 0:
            del parent[key]
        case 1:
            raw[place] = f"{json.dumps(parent[key])}, {json.dumps(str(key))}: {random.choice(ODD_JSON)}"
            if isinstance(parent, dict):  # a name twice
                parent[key] = place
        case 2 if isinstance(parent, dict):
            parent[random.choice(("", "__class__", "x" * 1000, "\ud800", str(key).upper()))] = parent.pop(key)
        case 3:
            parent[key] = [parent[key]] * random.choice((1, 2, 300))
        case _:
            raw[place] = random.choice(ODD_JSON)
            parent[key] = place
    return document


def _places(node: Any) -> Any:
    """Yield each container with each of its keys, however deep."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else ()
    for key, value in items[:50]:
        yield node, key
        yield from _places(value)


def mutate_toml(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Replace the value of a line, or repeat, move or add lines; one time in four mutate the bytes."""
    if random.random() < 0.25:
        return mutate_bytes(random, data, others)
    lines = data.decode().splitlines()
    for _ in range(random.choice((1, 1, 2))):
        number = random.randrange(len(lines))
        name = lines[number].partition("=")[0]
        added = random.choice(
            ("[a.b]", "[[frames]]", "x = 1", f"{name}.a = 1", f"'{name}' = 1", "a." * _DEEP + "b = 1")
        )
        match random.randrange(6):
            case 0:
                lines.insert(random.randrange(len(lines) + 1), added)
            case 1:
                lines.append(lines[number])
            case _:
                lines[number] = f"{name}= {random.choice(ODD_TOML)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_csv(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Replace, add or remove cells; one time in four mutate the bytes."""
    if random.random() < 0.25:
        return mutate_bytes(random, data, others)
    rows = [line.split(",") for line in data.decode().splitlines()]
    for _ in range(random.choice((1, 1, 2, 4))):
        row = random.choice(rows[1:] if random.random() < 0.8 else rows)
        match random.randrange(6):
            case 0:
                row.append(random.choice(ODD_CELLS))
            case 1 if row:
                del row[random.randrange(len(row))]
            case _ if row:
                row[random.randrange(len(row))] = random.choice(ODD_CELLS)
    return "\n".join(map(",".join, rows)).encode("utf-8", "surrogatepass")
