"""Color profiles, as cameras and scanners embed them; made here, because no machine has the same ones installed."""

import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

#: Columns: red, green and blue in XYZ, adapted to D50.
DISPLAY_P3 = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
ADOBE_RGB = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
SRGB = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])
D50 = (0.9642, 1.0, 0.8249)


def rgb_profile(primaries: NDArray[np.float64], gamma: float | None) -> bytes:
    """A profile of a display; without a gamma, its curve is that of sRGB."""
    curve = _curve(gamma)
    tags = {b"rTRC": curve, b"gTRC": curve, b"bTRC": curve, b"wtpt": _xyz(D50)}
    tags |= {name: _xyz(primaries[:, index]) for index, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    return _profile(b"RGB ", b"mntr", b"XYZ ", tags)


def gray_profile(gamma: float) -> bytes:
    """A profile of a scanner for gray."""
    return _profile(b"GRAY", b"mntr", b"XYZ ", {b"kTRC": _curve(gamma), b"wtpt": _xyz(D50)})


def cmyk_profile(corners: Mapping[tuple[int, int, int, int], tuple[float, float, float]]) -> bytes:
    """A profile of a printer.

    Args:
        corners: the CIE Lab color of each of the 16 combinations of no and full ink.
    """
    lut = b"mft1" + bytes(4) + bytes([4, 3, 2, 0])
    lut += b"".join(_s15(value) for value in np.eye(3).ravel())
    lut += bytes(range(256)) * 4
    for inks in sorted(corners):
        lightness, a, b = corners[inks]
        lut += bytes([round(lightness * 2.55), round(a + 128), round(b + 128)])
    lut += bytes(range(256)) * 3
    return _profile(b"CMYK", b"prtr", b"Lab ", {b"A2B0": lut, b"A2B1": lut, b"wtpt": _xyz(D50)})


def _profile(space: bytes, kind: bytes, connection: bytes, tags: Mapping[bytes, bytes]) -> bytes:
    tags = {b"desc": _description(b"a test"), b"cprt": b"text" + bytes(4) + b"none\0", **tags}
    table, content = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, tag in tags.items():
        table += struct.pack(">4sII", name, start + len(content), len(tag))
        content += tag + bytes(-len(tag) % 4)
    header = struct.pack(">I4sI4s4s4s", start + len(content), b"none", 0x02100000, kind, space, connection)
    header += struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp").ljust(44, b"\0") + b"".join(map(_s15, D50))
    return header.ljust(128, b"\0") + table + content


def _description(text: bytes) -> bytes:
    return b"desc" + bytes(4) + struct.pack(">I", len(text) + 1) + text + bytes(79)


def _curve(gamma: float | None) -> bytes:
    values = np.linspace(0, 1, 1024)
    curve = linear(values) if gamma is None else values**gamma
    return b"curv" + bytes(4) + struct.pack(">I1024H", 1024, *np.round(curve * 65535).astype(int))


def _xyz(values: Sequence[float] | NDArray[np.float64]) -> bytes:
    return b"XYZ " + bytes(4) + b"".join(map(_s15, values))


def _s15(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def linear(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Light of values of sRGB, both from 0 to 1 (IEC 61966-2-1)."""
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def encoded(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of `linear`; what sRGB lacks is clipped."""
    light = light.clip(0, 1)
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)
