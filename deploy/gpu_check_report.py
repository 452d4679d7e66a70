"""The file that `gpu_check.py` writes: what was run and said, and each figure beside what is wanted of it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One figure beside what is wanted of it."""

    what: str
    measured: str
    wanted: str
    #: None where the figure is only told.
    good: bool | None


class Report:
    """The Markdown file, written as sections end, so that one which hangs loses no other."""

    def __init__(self, path: Path, *, timeout_s: float = 3600) -> None:
        self.path = path
        self.verdicts: list[Verdict] = []
        self.failures: list[str] = []
        self._timeout_s = timeout_s

    def add(self, text: str) -> None:
        """Add a paragraph, also on the terminal."""
        print(f"{text}\n", flush=True)  # noqa: T201
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")

    def section(self, title: str, check: Callable[[], None]) -> None:
        """Do a check under a heading of its own; whatever it raises is its failure."""
        self.add(f"## {title}")
        try:
            check()
        except Exception as error:  # noqa: BLE001 - the other sections go on, whatever it was
            self.failures.append(title)
            self.add(f"**This section failed**: {type(error).__name__}: {error}")

    def run(self, *arguments: object) -> None:
        """Run a module of svdq's and add what it printed.

        Raises:
            RuntimeError: it did not end with 0, or not in time.
        """
        command = [sys.executable, "-m", *map(str, arguments)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            output, complaints = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
            output, complaints = process.communicate()
            complaints += f"\nIt was ended after {self._timeout_s:.0f} s."
        shown = " ".join(["python", *command[1:]])
        said = "\n".join(part for part in (complaints.strip()[-6000:], output.rstrip()) if part)
        self.add(f"    {shown}\n\n```\n{said}\n```")
        if process.returncode != 0:
            raise RuntimeError(f"exit code {process.returncode}")

    def judge(self, what: str, measured: str, wanted: str, good: bool | None) -> None:
        """Put a figure beside what is wanted."""
        self.verdicts.append(Verdict(what=what, measured=measured, wanted=wanted, good=good))
        mark = {True: "as wanted", False: "**not as wanted**", None: "told"}[good]
        self.add(f"{what}: measured {measured}; wanted {wanted}: {mark}.")

    def finish(self) -> int:
        """Add the table of all figures and give the exit code."""
        rows = [
            f"| {one.what} | {one.measured} | {one.wanted} | { {True: 'yes', False: '**no**', None: ''}[one.good] } |"
            for one in self.verdicts
        ]
        self.add("## All figures\n\n| what | measured | wanted | reached |\n|---|---|---|---|\n" + "\n".join(rows))
        missed = [one.what for one in self.verdicts if one.good is False]
        failed = [f"{title} (failed)" for title in self.failures] + missed
        self.add("All sections ran and all is as wanted." if not failed else f"Not as wanted: {'; '.join(failed)}.")
        return 1 if failed else 0
