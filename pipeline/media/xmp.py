"""Builds XMP packets: when and where a photo was taken, and the mark that a model has made a video.

The mark is IPTC's digital source type, which photo libraries and platforms read. Names are those of the XMP
specification, parts 1 and 3, and of IPTC's photo metadata standard 2025.1.
"""

import struct
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import quoteattr

from svdq.pipeline.media.capture import Capture

#: Terms of IPTC's vocabulary: frames of a trained model, also of one that begins with a photo; and a photo that an
#: algorithm without a model has changed.
SourceType = Literal["trainedAlgorithmicMedia", "algorithmicallyEnhanced"]

VOCABULARY = "http://cv.iptc.org/newscodes/digitalsourcetype/"
_NAMESPACES = (
    ("exif", "http://ns.adobe.com/exif/1.0/"),
    ("xmp", "http://ns.adobe.com/xap/1.0/"),
    ("Iptc4xmpExt", "http://iptc.org/std/Iptc4xmpExt/2008-02-29/"),
)
_MP4_UUID = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How files say what made them."""

    source_type: SourceType
    tool: str  # name and version of the program
    model: str  # its name


def packet(mark: Mark | None, capture: Capture | None = None) -> bytes:
    """Return a packet with a mark and with the time and place of a photo; empty if there is neither."""
    fields = {} if capture is None else _of_capture(capture)
    if mark is not None:
        fields |= {
            "xmp:CreatorTool": mark.tool,
            "Iptc4xmpExt:DigitalSourceType": f"{VOCABULARY}{mark.source_type}",
            "Iptc4xmpExt:AISystemUsed": mark.model,
        }
    if not fields:
        return b""
    used = {name.partition(":")[0] for name in fields}
    spaces = {f"xmlns:{name}": address for name, address in _NAMESPACES if name in used}
    attributes = "".join(f" {name}={quoteattr(value)}" for name, value in (spaces | fields).items())
    return (
        '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        f'<rdf:Description rdf:about=""{attributes}/></rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
    ).encode()


def mp4_box(xmp: bytes) -> bytes:
    """Return the box of an mp4 that holds a packet."""
    return struct.pack(">I4s16s", 24 + len(xmp), b"uuid", _MP4_UUID) + xmp


def gif_extension(xmp: bytes) -> bytes:
    """Return the application extension of a GIF that holds a packet; of an empty one, nothing."""
    # The packet as it is, then bytes that lead a reader of blocks to its end.
    return b"\x21\xff\x0bXMP DataXMP" + xmp + b"\x01" + bytes(range(0xFF, -1, -1)) + b"\x00" if xmp else b""


def riff_chunk(name: bytes, content: bytes) -> bytes:
    """Return a chunk of a RIFF file, such as WebP or WAV."""
    return name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def _of_capture(capture: Capture) -> dict[str, str]:
    if capture.time is None:
        return {}
    fields = {"xmp:CreateDate": capture.time_text, "exif:DateTimeOriginal": capture.time_text}
    if capture.location is not None:
        for name, value, sides in zip(("Latitude", "Longitude"), capture.location, ("NS", "EW"), strict=True):
            degrees = f"{abs(value) // 1:.0f},{abs(value) % 1 * 60:.4f}"
            fields[f"exif:GPS{name}"] = f"{degrees}{sides[value < 0]}"
    return fields
