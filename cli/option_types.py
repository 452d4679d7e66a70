"""Types of options that click has not: files to be written at the end, and numbers that are finite. Know no command."""

import math
import os
from pathlib import Path
from typing import Any

import click


class Number(click.FloatRange):
    """A number within bounds, which `nan` would pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the number.

        Raises:
            BadParameter: it is none, or out of bounds.
        """
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number that can be computed with.", param, ctx)
        return number


#: Lengths of time; so many are eleven days.
MILLISECONDS = Number(0, 1e9)


class OutputFile(click.Path):
    """A file that can be written: no folder, in a folder that is there, with one of these ends if any are named."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the place that was given.

        Raises:
            BadParameter: nothing can be written there.
        """
        from svdq.pipeline.errors import InputError
        from svdq.producer.results.pages import check_target

        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        # What is there already is written in place: it may be /dev/stdout, in a folder that nobody may write to.
        if self._suffixes or not os.path.exists(value):
            try:
                check_target(path, self._suffixes)
            except (InputError, OSError) as error:
                self.fail(str(error), param, ctx)
        return path
