"""What makes measured figures doubtful, in sentences. Pure."""

from collections.abc import Sequence

from svdq.pipeline.bench.ends_parts import PartFigures
from svdq.pipeline.bench.precision import SHORT

#: The longest of the same measurement over the shortest above which something else was at work.
_UNSTEADY = 1.2


def unsteady(figures: Sequence[PartFigures]) -> list[str]:
    """Say when times differ so much from one time to the next that conclusions are worth little."""
    done = [one for one in figures if not one.failure]
    num_unsteady = sum(max(one.all_s) > _UNSTEADY * min(one.all_s) for one in done)
    if not num_unsteady:
        return []
    return [
        f"{num_unsteady} of {len(done)} times differ by more than {_UNSTEADY - 1:.0%} from one time to the next: "
        "something else uses the device, so measure again."
    ]


def not_finite(figures: Sequence[PartFigures]) -> list[str]:
    """Say which parts made infinities or NaN, since a video fails there however fast it is."""
    makes = {"step": "What the UNet predicts", "encode": "What the encoder makes", "decode": "What the decoder makes"}
    sizes: dict[tuple[str, str], dict[str, None]] = {}
    for one in figures:
        if not one.finite:
            sizes.setdefault((one.part, SHORT[one.dtype]), {})[f"{one.width}x{one.height}"] = None
    return [
        f"{makes[part]} in {dtype} is not finite with these weights (at {', '.join(of)}): a worker fails such videos."
        for (part, dtype), of in sizes.items()
    ]
