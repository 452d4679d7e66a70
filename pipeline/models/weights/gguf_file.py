"""Opens GGUF files with the package gguf, whose reader trusts every count in them, after a check of their header."""

import mmap
import struct
from pathlib import Path
from typing import Any, Final

MAX_ENTRIES: Final = 1 << 17  # fields, and tensors; models have thousands
MAX_ELEMENTS: Final = 1 << 21  # of all arrays; the largest tokenizers have 2^18 pieces, each with a score and a type
MAX_NAME_BYTES: Final = 1 << 16
MAX_DIMENSIONS, MAX_NUMBERS = 8, 1 << 48  # of a tensor
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of numbers by their type
_STRING, _ARRAY = 8, 9


def open_gguf(file: Path) -> Any:
    """Return the package's reader of a file; raises OSError, ValueError for what is not whole, or ImportError."""
    from gguf import GGUFReader

    with file.open("rb") as opened:
        try:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ValueError("it is empty") from error
        with mapped:
            _Header(mapped).check()
    try:
        return GGUFReader(file)
    except (LookupError, TypeError, ArithmeticError) as error:
        raise ValueError(str(error)) from error


class _Header:
    """Walks through the header of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._place = 8
        self._num_elements = 0
        if data[:4] != b"GGUF":
            raise ValueError("it is no GGUF file")
        self._order = "<" if struct.unpack("<I", data[4:8].ljust(4))[0] & 0xFFFF else ">"

    def check(self) -> None:
        """Raise ValueError if the header is cut off, or has more than a model has."""
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        if max(num_tensors, num_fields) > MAX_ENTRIES:
            raise ValueError(f"it counts {num_tensors:,} tensors and {num_fields:,} fields")
        for _ in range(num_fields):
            self._name()
            self._value(self._number("I"))
        for _ in range(num_tensors):
            self._name()
            if (num_dimensions := self._number("I")) > MAX_DIMENSIONS:
                raise ValueError(f"it has a tensor of {num_dimensions:,} dimensions")
            num_numbers = 1
            for _ in range(num_dimensions):
                num_numbers *= self._number("Q")
            if num_numbers > MAX_NUMBERS:
                raise ValueError(f"it has a tensor of {num_numbers:,} numbers")
            self._skip(4 + 8)  # its type, and where it is

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            of, number = self._number("I"), self._number("Q")
            self._num_elements += number
            if self._num_elements > MAX_ELEMENTS:
                raise ValueError(f"it has arrays of more than {MAX_ELEMENTS:,} elements")
            if of == _STRING:
                for _ in range(number):
                    self._skip(self._number("Q"))
            else:
                self._skip(number * self._size(of))
        else:
            self._skip(self._size(kind))

    def _size(self, kind: int) -> int:
        if kind not in _SIZES:
            raise ValueError(
                "it has arrays in arrays" if kind == _ARRAY else f"it has a field of the unknown type {kind}"
            )
        return _SIZES[kind]

    def _name(self) -> None:
        if (num_bytes := self._number("Q")) > MAX_NAME_BYTES:
            raise ValueError(f"it has a name of {num_bytes:,} bytes")
        self._skip(num_bytes)

    def _number(self, form: str) -> int:
        place = self._place
        self._skip(struct.calcsize(form))
        return int(struct.unpack_from(f"{self._order}{form}", self._data, place)[0])

    def _skip(self, num_bytes: int) -> None:
        self._place += num_bytes
        if self._place > len(self._data):
            raise ValueError("it is cut off in its header")
