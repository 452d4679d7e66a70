"""Sizes of videos for the shapes of photos: the nearest allowed one, and how much of a photo a crop removes."""

from math import log

from svdq.pipeline.parameters import MAX_SIDE
from svdq.producer.job import Job

#: Share of a photo's width or height from which its removal by a crop is worth a warning.
WORTH_A_WARNING = 0.2


def nearest_size(photo: tuple[int, int], area: int, multiple: int) -> tuple[int, int]:
    """Return the allowed size that is nearest to a photo's shape and to an area, which it does not exceed.

    A larger area could need more memory than a video that fits. A wrong shape counts twice as much as a smaller area.
    """
    sizes = [
        (width, height)
        for width in range(multiple, min(MAX_SIDE, area // multiple) + 1, multiple)
        for height in _heights(width * photo[1] / photo[0], min(MAX_SIDE, area // width), multiple)
    ]

    def badness(size: tuple[int, int]) -> float:
        width, height = size
        return 2 * abs(log(width * photo[1] / (height * photo[0]))) + log(area / (width * height))

    return min(sizes, key=badness)


def _heights(ideal: float, highest: int, multiple: int) -> set[int]:
    """Return the multiples next to the ideal height, up to the highest."""
    limit = highest // multiple
    below = min(max(1, int(ideal // multiple)), limit)
    return {below * multiple, min(below + 1, limit) * multiple}


def crop_warning(photo: tuple[int, int] | None, job: Job) -> str:
    """Say how much a crop removes, such as `crop removes 54% of the photo's height`; "" if that is little."""
    if photo is None or job.fit != "crop" or not (job.width and job.height):
        return ""
    scale = max(job.width / photo[0], job.height / photo[1])
    removed = {"width": 1 - job.width / (photo[0] * scale), "height": 1 - job.height / (photo[1] * scale)}
    side = max(removed, key=removed.__getitem__)
    return f"crop removes {removed[side]:.0%} of the photo's {side}" if removed[side] > WORTH_A_WARNING else ""
