"""Runs a target in a process of its own, for its crash to be a finding and its memory to be its own."""

import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.run import Outcome, run
from tests.fuzz.targets import TARGETS


def run_apart(name: str, saved: Path, seed: int, seconds: float) -> Outcome:
    """Run a target in a process of its own, whose crash is a finding."""
    processes = multiprocessing.get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_run_here, args=(sender, name, saved, seed, seconds))
    process.start()
    sender.close()
    try:
        outcome: Outcome = receiver.recv()
    except EOFError:
        process.join()
        outcome = Outcome(name=name)
        outcome.findings["crash"] = f"{name}: exit code {process.exitcode}; input: {saved / name}.current"
    process.join()
    return outcome


def _run_here(sender: Connection, name: str, saved: Path, seed: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="svdq-fuzz-files-") as folder:
        sender.send(run(name, TARGETS[name], Path(folder), saved, seed=seed, seconds=seconds))
