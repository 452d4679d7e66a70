"""Assembles animated GIF and WebP files: exactly one image for every frame, exact timing, and a comment.

Encoders merge equal frames and round all delays alike, so the containers are assembled here from frames that ffmpeg and
Pillow have encoded.
"""

import struct
from collections.abc import Iterable, Iterator

from PIL import Image

#: The shortest delay of a GIF frame, in hundredths of a second: browsers replace shorter ones by a tenth of a second.
GIF_SHORTEST_DELAY = 2

#: EXIF tag ImageDescription.
IMAGE_DESCRIPTION = 0x010E


def spread(num_frames: int, fps: int, units_per_second: int) -> list[int]:
    """Distribute the duration of a video over its frames in whole units, so that no frame is off by more than one.

    Returns:
        The delay of each frame, in units.
    """
    ends = [round(units_per_second * (frame + 1) / fps) for frame in range(num_frames)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def finish_gif(data: bytes, fps: int, comment: str) -> bytes:
    """Set the delays of a GIF and put a comment, as UTF-8, before its first image.

    The block names are those of the GIF89a specification. Above 50 frames a second, the limit of GIF, the file plays
    slower than requested.
    """
    blocks = list(_gif_blocks(data))
    controls = [index for index, block in enumerate(blocks) if block.startswith(b"\x21\xf9")]
    delays = [max(GIF_SHORTEST_DELAY, delay) for delay in spread(len(controls), fps, 100)]
    for index, delay in zip(controls, delays, strict=True):
        # Graphic Control Extension: introducer, label, size, flags, delay (2 bytes), transparent colour, terminator.
        blocks[index] = blocks[index][:4] + struct.pack("<H", delay) + blocks[index][6:]
    text = comment.encode()
    pieces = [text[start : start + 255] for start in range(0, len(text), 255)]
    comment_block = b"\x21\xfe" + b"".join(bytes([len(piece)]) + piece for piece in pieces) + b"\x00"
    return b"".join([*blocks[: controls[0]], comment_block, *blocks[controls[0] :]])


def _gif_blocks(data: bytes) -> Iterator[bytes]:
    """Split a GIF into its header with the global colour table, extensions, images and trailer."""
    start, end = 0, 13 + _gif_colour_table_size(data[10])
    while True:
        yield data[start:end]
        if end == len(data):
            return
        start = end
        match data[start]:
            case 0x21:  # Extension Introducer and label
                end = _gif_skip_sub_blocks(data, start + 2)
            case 0x2C:  # Image Descriptor, local colour table, LZW code size
                end = _gif_skip_sub_blocks(data, start + 10 + _gif_colour_table_size(data[start + 9]) + 1)
            case _:  # Trailer
                end = len(data)


def _gif_colour_table_size(flags: int) -> int:
    return 3 * 2 ** ((flags & 0x07) + 1) if flags & 0x80 else 0


def _gif_skip_sub_blocks(data: bytes, position: int) -> int:
    while data[position]:
        position += data[position] + 1
    return position + 1


def join_webp(frames: Iterable[bytes], width: int, height: int, delays_ms: Iterable[int], comment: str) -> bytes:
    """Join WebP images of one size into an endless animation, with a comment, as UTF-8, in EXIF's ImageDescription.

    Args:
        frames: opaque WebP files, each of one VP8 or VP8L chunk.
        width: pixels.
        height: pixels.
        delays_ms: how long each frame is shown.
        comment: any text.
    """
    exif = Image.Exif()
    exif[IMAGE_DESCRIPTION] = comment.encode()
    size = _uint24(width - 1) + _uint24(height - 1)
    # The names of chunks and fields are those of the WebP container specification.
    animation, has_exif, do_not_blend = 0x02, 0x08, 0x02
    chunks = [_chunk(b"VP8X", bytes([animation | has_exif, 0, 0, 0]) + size), _chunk(b"ANIM", bytes(6))]
    for frame, delay_ms in zip(frames, delays_ms, strict=True):
        bitstream = frame[12:]
        assert bitstream[:4] in {b"VP8 ", b"VP8L"}, "an opaque image has one chunk"
        chunks.append(_chunk(b"ANMF", bytes(6) + size + _uint24(delay_ms) + bytes([do_not_blend]) + bitstream))
    chunks.append(_chunk(b"EXIF", exif.tobytes().removeprefix(b"Exif\x00\x00")))
    return _chunk(b"RIFF", b"WEBP" + b"".join(chunks))


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def _uint24(value: int) -> bytes:
    return struct.pack("<I", value)[:3]
