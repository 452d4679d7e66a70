"""Writes the report of `gpu_check.py`: commands with their output, and each figure beside the required one.

It is written line by line as commands print, so a killed run loses nothing. A JSON file beside it has the same content,
from which a later run of other sections keeps the existing ones.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Suffix of every figure of a run without a GPU.
NO_GPU = " (no GPU)"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One figure with its requirement."""

    what: str
    measured: str
    wanted: str
    #: None if the figure has no requirement.
    good: bool | None


@dataclass(kw_only=True)
class Section:
    """The content under one heading."""

    #: Its paragraphs.
    text: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    failed: bool = False


class Report:
    """The Markdown file, written while sections run, each within its time limit."""

    def __init__(
        self, path: Path, *, section_s: float = 570, where: str = "", trial: bool = False, keep: bool = False
    ) -> None:
        """Start the report.

        Args:
            path: path of the Markdown file.
            section_s: seconds that the commands of a section may take.
            where: description of the device, repeated under each heading.
            trial: whether there is no GPU, so that the figures are meaningless.
            keep: keep the sections of earlier runs.
        """
        self.path = path
        self._section_s = section_s
        self._deadline = time.monotonic() + section_s
        self._where = where
        self._trial = trial
        #: Sections by title, and the measurements that later sections use.
        self.sections: dict[str, Section] = {}
        self.figures: dict[str, Any] = {}
        self._kept_at = path.with_suffix(".json")
        if keep and self._kept_at.exists():
            kept = json.loads(self._kept_at.read_text(encoding="utf-8"))
            self.figures = kept["figures"]
            for title, section in kept["sections"].items():
                verdicts = [Verdict(**verdict) for verdict in section.pop("verdicts")]
                self.sections[title] = Section(**section, verdicts=verdicts)
        self._section = Section()

    def section(self, title: str, check: Callable[[], None]) -> None:
        """Run a check under its own heading, replacing an earlier one; an exception marks it as failed."""
        self._section = self.sections[title] = Section()
        self._deadline = time.monotonic() + self._section_s
        print(f"## {title}\n", flush=True)  # noqa: T201
        if self._where:
            self.add(self._where)
        try:
            check()
        except Exception as error:  # noqa: BLE001 - the other sections continue after any error
            self.fail(f"{type(error).__name__}: {error}")
        self._write()

    def fail(self, reason: str) -> None:
        """Mark the section as failed; its measurements stay."""
        self._section.failed = True
        self.add(f"**This section failed**: {reason}")

    def add(self, text: str) -> None:
        """Add a paragraph to the section, and print it."""
        print(f"{text}\n", flush=True)  # noqa: T201
        self._section.text.append(text)
        self._write()

    def run(self, *arguments: object, environment: Mapping[str, str] | None = None) -> str:
        """Run a module of svdq and add each line of its output; return the output.

        Raises:
            RuntimeError: the exit code was not 0, or the section's time was over.
        """
        command = [sys.executable, "-m", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**(environment or os.environ), "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        seconds = max(0.0, self._deadline - time.monotonic())
        late = threading.Event()

        def end() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too

        timer = threading.Timer(seconds, end)
        timer.start()
        shown, said = " ".join(["python", *command[1:]]), ""
        print(f"    {shown}\n", flush=True)  # noqa: T201
        self._section.text.append("")
        try:
            for line in process.stdout:
                print(line, end="", flush=True)  # noqa: T201
                said += line
                self._section.text[-1] = f"    {shown}\n\n```\n{said.rstrip()}\n```"
                self._write()
            process.wait()
        finally:
            timer.cancel()
            process.stdout.close()
        if late.is_set():
            raise RuntimeError(f"it was ended after {self._section_s:.0f} s, the time of a section")
        if process.returncode != 0:
            raise RuntimeError(f"exit code {process.returncode}")
        return said

    def judge(self, what: str, measured: str, wanted: str, good: bool | None) -> None:
        """Add a figure with its requirement."""
        what += NO_GPU if self._trial else ""
        self._section.verdicts.append(Verdict(what=what, measured=measured, wanted=wanted, good=good))
        mark = {True: "as wanted", False: "**not as wanted**", None: "told"}[good]
        self.add(f"{what}: measured {measured}; wanted {wanted}: {mark}.")

    def finish(self) -> int:
        """Print the table of all figures and return the exit code."""
        self._write()
        print(self._ending(), flush=True)  # noqa: T201
        return 1 if self._failed() else 0

    def _failed(self) -> list[str]:
        failed = [f"{title} (failed)" for title, section in self.sections.items() if section.failed]
        return failed + [
            one.what for section in self.sections.values() for one in section.verdicts if one.good is False
        ]

    def _ending(self) -> str:
        marks = {True: "yes", False: "**no**", None: ""}
        verdicts = [one for section in self.sections.values() for one in section.verdicts]
        rows = [f"| {one.what} | {one.measured} | {one.wanted} | {marks[one.good]} |" for one in verdicts]
        table = "\n".join(["| what | measured | wanted | reached |", "|---|---|---|---|", *rows])
        if failed := self._failed():
            last = f"Not as wanted: {'; '.join(failed)}."
        else:
            last = f"All is as wanted in the sections that ran: {'; '.join(self.sections)}."
        if any(NO_GPU in one.what for one in verdicts) or self._trial:
            last = f"What has no GPU to it says nothing about GPUs: it only tries the script. {last}"
        return f"## All figures\n\n{table}\n\n{last}"

    def _write(self) -> None:
        sections = [
            "\n\n".join([f"## {title}", *section.text]) for title, section in self.sections.items() if section.text
        ]
        # In one step: a machine that is taken back in the middle of it leaves the report before.
        partial = self.path.with_suffix(".partial")
        partial.write_text("\n\n".join(["# GPU check", *sections, self._ending()]) + "\n", encoding="utf-8")
        partial.replace(self.path)
        kept = {"figures": self.figures, "sections": {title: asdict(one) for title, one in self.sections.items()}}
        self._kept_at.write_text(json.dumps(kept, indent=2), encoding="utf-8")
