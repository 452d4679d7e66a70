"""A GGUF file that is cut off or counts what it does not have is one sentence, at once."""

import struct
import time
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.weights.model_folder import gguf_fields, gguf_tensors, has_tokenizer, weights_in

STRING, ARRAY, UINT8 = 8, 9, 0


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def gguf(*fields: bytes, tensors: bytes = b"", num_tensors: int = 0, num_fields: int | None = None) -> bytes:
    counts = struct.pack("<IQQ", 3, num_tensors, len(fields) if num_fields is None else num_fields)
    return b"GGUF" + counts + b"".join(fields) + tensors


def array(of: int, number: int, content: bytes = b"") -> bytes:
    return text(b"a.field") + struct.pack("<IIQ", ARRAY, of, number) + content


def tensor(*dimensions: int) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(b"blocks.0.weight") + shape + struct.pack("<IQ", 0, 0)


HOSTILE = {
    "empty": b"",
    "other": b"\x89PNG" + bytes(100),
    "magic": b"GGUF",
    "many tensors": gguf(num_tensors=2**60),
    "many fields": gguf(num_fields=2**40),
    "long string": gguf(text(b"a.field") + struct.pack("<IQ", STRING, 2**63)),
    "long array": gguf(array(UINT8, 2**40)),
    "long array of strings": gguf(array(STRING, 2**40)),
    "array of arrays": gguf(array(ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 5000)),
    "unknown type": gguf(text(b"a.field") + struct.pack("<I", 77)),
    "field twice": gguf(*[text(b"a.field") + struct.pack("<IB", UINT8, 1)] * 2),
    "many dimensions": gguf(tensors=text(b"w") + struct.pack("<I", 2**31), num_tensors=1),
    "overflow": gguf(tensors=tensor(2**32, 2**32), num_tensors=1),
    "no data": gguf(tensors=tensor(1024, 1024), num_tensors=1),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(data)
    started = time.monotonic()
    for read in (gguf_tensors, weights_in):
        with pytest.raises(InputError, match="cannot be read"):
            read(file)
    assert gguf_fields(file) == {}
    assert not has_tokenizer(file)
    assert time.monotonic() - started < 2


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    import numpy as np

    gguf = pytest.importorskip("gguf")
    file = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(file, "wan")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_tensor("blocks.0.weight", np.ones((2, 32), dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return file


def test_a_file_that_is_cut_off_anywhere(whole: Path, tmp_path: Path) -> None:
    assert [each.name for each in weights_in(whole)] == ["blocks.0.weight"]
    assert has_tokenizer(whole)
    data, cut = whole.read_bytes(), tmp_path / "cut.gguf"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        with pytest.raises(InputError, match="cannot be read"):
            gguf_tensors(cut)
