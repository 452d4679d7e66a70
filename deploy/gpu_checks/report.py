"""Writes the report of `gpu_check.py`: commands with their output, and each figure beside the required one.

Everything is appended to the file as it is printed: a killed run loses nothing, and a later run adds its sections.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path


class Report:
    """The Markdown file, written while sections run, each within its time limit."""

    def __init__(self, path: Path, *, section_s: float = 570, total_s: float = math.inf, where: str = "") -> None:
        """Start the report.

        Args:
            path: path of the Markdown file.
            section_s: seconds that the commands of a section may take.
            total_s: seconds that all commands may take.
            where: description of the device, repeated under each heading.
        """
        self.path = path
        self._section_s = section_s
        self._end = time.monotonic() + total_s
        self._deadline = min(self._end, time.monotonic() + section_s)
        self._where = where
        self._title = ""
        #: Rows of the table of all figures, and what is not as wanted.
        self._rows: list[str] = []
        self._failed: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end

    def section(self, title: str, check: Callable[..., None], *arguments: object) -> bool:
        """Call a check with arguments under its own heading; return whether it ended with all as wanted.

        An exception marks it as failed.
        """
        self._title, num_failed = title, len(self._failed)
        self._deadline = min(self._end, time.monotonic() + self._section_s)
        self.add(f"## {title}")
        if self._where:
            self.add(self._where)
        try:
            check(*arguments)
        except Exception as error:  # noqa: BLE001 - the other sections continue after any error
            self.fail(f"{type(error).__name__}: {error}")
        return len(self._failed) == num_failed

    def fail(self, reason: str) -> None:
        """Mark the section as failed, with a row that says why; its measurements stay."""
        self._failed.append(f"{self._title} (failed)")
        self._rows.append(f"| {self._title} | failed: {reason} | | **no** |")
        self.add(f"**This section failed**: {reason}")

    def add(self, text: str) -> None:
        """Add a paragraph, and print it."""
        self._write(f"{text}\n\n")

    def run(
        self,
        program: str | Path,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        least_s: float = 1.0,
    ) -> str:
        """Run a module, or a script given as a path, and add each line of its output; return the output.

        It has what is left of the section's time, and `least_s` in any case.

        Raises:
            RuntimeError: the exit code was not 0, or the section's time was over.
        """
        command = [str(program)] if isinstance(program, Path) else ["-m", program]
        command += map(str, arguments)
        left_s = max(least_s, self._deadline - time.monotonic())
        # `timeout` kills the command's ranks, too.
        process = subprocess.Popen(
            ["/usr/bin/timeout", "--signal=KILL", str(left_s), sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**(environment or os.environ), "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        assert process.stdout is not None
        lines = []
        self._write(f"    {' '.join(['python', *command])}\n\n```\n")
        try:
            for line in process.stdout:
                self._write(line)
                lines.append(line)
            process.wait()
        finally:
            process.stdout.close()
            self._write("```\n\n")
        if process.returncode == -signal.SIGKILL and time.monotonic() >= self._deadline:
            raise RuntimeError("it was ended after the time of a section, or of all of them")
        if process.returncode != 0:
            raise RuntimeError(f"exit code {process.returncode}")
        return "".join(lines)

    def judge(self, what: str, measured: str, wanted: str, good: bool | None) -> None:
        """Add a figure with its requirement; `good` is None if there is none."""
        self.add(f"{what}: measured {measured}; wanted: {wanted or 'no requirement'}.")
        mark = {True: "yes", False: "**no**", None: ""}[good]
        self._rows.append(f"| {what} | {measured} | {wanted} | {mark} |")
        if good is False:
            self._failed.append(what)

    def finish(self) -> int:
        """Add the table of all figures and return the exit code."""
        self.add(
            "\n".join(["## All figures\n", "| what | measured | wanted | reached |", "|---|---|---|---|", *self._rows])
        )
        self.add(
            f"Not as wanted: {'; '.join(self._failed)}." if self._failed else "All that was measured is as wanted."
        )
        return 1 if self._failed else 0

    def _write(self, text: str) -> None:
        print(text, end="", flush=True)  # noqa: T201
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
