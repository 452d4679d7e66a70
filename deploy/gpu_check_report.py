"""The file that `gpu_check.py` writes: what was run and said, and each figure beside what is wanted of it.

Beside it lies the same as JSON, from which a later run of other sections takes up what is there.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: What stands behind every figure of a run without a GPU.
NO_GPU = " (no GPU)"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One figure beside what is wanted of it."""

    what: str
    measured: str
    wanted: str
    #: None where the figure is only told.
    good: bool | None


@dataclass(kw_only=True)
class Section:
    """What is under one heading."""

    #: Its paragraphs.
    text: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    failed: bool = False


class Report:
    """The Markdown file, written as sections go on, so that one which hangs loses no other."""

    def __init__(
        self, path: Path, *, timeout_s: float = 3600, where: str = "", trial: bool = False, keep: bool = False
    ) -> None:
        """Begin it.

        Args:
            path: of the Markdown.
            timeout_s: seconds that one command may take.
            where: on what all is measured; stands under each heading.
            trial: whether there is no GPU, so that nothing says anything about GPUs.
            keep: take up the sections of earlier runs.
        """
        self.path = path
        self.timeout_s = timeout_s
        self._where = where
        self._trial = trial
        #: By their titles, and what sections measured for those after them.
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
        """Do a check under a heading of its own, in place of an earlier one; whatever it raises is its failure."""
        self._section = self.sections[title] = Section()
        print(f"## {title}\n", flush=True)  # noqa: T201
        if self._where:
            self.add(self._where)
        try:
            check()
        except Exception as error:  # noqa: BLE001 - the other sections go on, whatever it was
            self._section.failed = True
            self.add(f"**This section failed**: {type(error).__name__}: {error}")
        self._write()

    def add(self, text: str) -> None:
        """Add a paragraph to the section, also on the terminal."""
        print(f"{text}\n", flush=True)  # noqa: T201
        self._section.text.append(text)
        self._write()

    def run(self, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        """Run a module of svdq's, in this process's environment or another one, and add what it printed.

        Raises:
            RuntimeError: it did not end with 0, or not in time.
        """
        command = [sys.executable, "-m", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        try:
            output, complaints = process.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
            output, complaints = process.communicate()
            complaints += f"\nIt was ended after {self.timeout_s:.0f} s."
        shown = " ".join(["python", *command[1:]])
        said = "\n".join(part for part in (complaints.strip()[-6000:], output.rstrip()) if part)
        self.add(f"    {shown}\n\n```\n{said}\n```")
        if process.returncode != 0:
            raise RuntimeError(f"exit code {process.returncode}")

    def judge(self, what: str, measured: str, wanted: str, good: bool | None) -> None:
        """Put a figure beside what is wanted."""
        what += NO_GPU if self._trial else ""
        self._section.verdicts.append(Verdict(what=what, measured=measured, wanted=wanted, good=good))
        mark = {True: "as wanted", False: "**not as wanted**", None: "told"}[good]
        self.add(f"{what}: measured {measured}; wanted {wanted}: {mark}.")

    def finish(self) -> int:
        """Show the table of all figures and give the exit code."""
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
        self.path.write_text("\n\n".join(["# GPU check", *sections, self._ending()]) + "\n", encoding="utf-8")
        kept = {"figures": self.figures, "sections": {title: asdict(one) for title, one in self.sections.items()}}
        self._kept_at.write_text(json.dumps(kept, indent=2), encoding="utf-8")
