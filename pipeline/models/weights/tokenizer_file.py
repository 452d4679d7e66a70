"""The tokenizer inside a text encoder's file, as ComfyUI has it. Does not import torch.

Its safetensors files of T5 have SentencePiece's model as the tensor `spiece_model`, GGUF files its pieces as fields.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.weights.model_folder import SENTENCEPIECE, gguf_fields, has_tokenizer
from svdq.pipeline.models.weights.safetensors_file import SafetensorsFile

_UNKNOWN = 2  # the type of the piece for unknown text, in SentencePiece and in GGUF


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A SentencePiece model of the kind Unigram."""

    scores: list[tuple[str, float]]
    unknown: int  # place of the piece for unknown text
    charsmap: bytes  # normalization, compiled; empty: none
    byte_fallback: bool = False


def load_tokenizer(file: Path) -> Any:
    """Return the tokenizer inside a file as one of transformers; raises InputError if there is none."""
    import transformers
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    if not has_tokenizer(file):
        raise InputError(f"The text encoder {file} has no tokenizer inside; fetch the base's with `svdq model pull`.")
    pieces = _of_gguf(file) if file.suffix == ".gguf" else _of_safetensors(file)
    made = Tokenizer(models.Unigram(pieces.scores, unk_id=pieces.unknown, byte_fallback=pieces.byte_fallback))
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    # As transformers' conversion of T5's SentencePiece models does.
    made.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(pieces.charsmap), spaces] if pieces.charsmap else [spaces]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    end = next(place for place, (piece, _) in enumerate(pieces.scores) if piece == "</s>")
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def _of_safetensors(file: Path) -> Pieces:
    return read_sentencepiece(SafetensorsFile.open(file).bytes_of(SENTENCEPIECE))


def read_sentencepiece(model: bytes) -> Pieces:
    """Read SentencePiece's ModelProto; field numbers are from its sentencepiece_model.proto."""
    scores: list[tuple[str, float]] = []
    unknown, charsmap, byte_fallback = 0, b"", False
    for number, value in _fields(model):
        if number == 1:  # pieces: 1 the piece, 2 its score, 3 its type
            piece = dict(_fields(value))
            if piece.get(3) == _UNKNOWN:
                unknown = len(scores)
            scores.append((piece.get(1, b"").decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0]))
        elif number == 2:  # trainer_spec
            byte_fallback = bool(dict(_fields(value)).get(35, False))
        elif number == 3:  # normalizer_spec
            charsmap = dict(_fields(value)).get(2, b"")
    return Pieces(scores=scores, unknown=unknown, charsmap=charsmap, byte_fallback=byte_fallback)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a message of Protocol Buffers: integers, and all others as bytes."""
    place = 0

    def integer() -> int:
        nonlocal place
        found = shift = 0
        while True:
            byte = message[place]
            place += 1
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    while place < len(message):
        key = integer()
        kind = key & 7
        if kind == 0:
            yield key >> 3, integer()
            continue
        size = {1: 8, 5: 4}.get(kind) or integer()
        yield key >> 3, message[place : place + size]
        place += size


def _of_gguf(file: Path) -> Pieces:
    """Read the fields that llama.cpp's conversion of T5 writes."""
    fields = {name.removeprefix("tokenizer.ggml."): field for name, field in gguf_fields(file).items()}

    def content(name: str, default: Any) -> Any:
        return fields[name].contents() if name in fields else default

    scores = list(zip(content("tokens", []), map(float, content("scores", [])), strict=True))
    unknown = content("unknown_token_id", _UNKNOWN)
    charsmap = bytes(content("precompiled_charsmap", []))
    return Pieces(scores=scores, unknown=int(unknown), charsmap=charsmap)
