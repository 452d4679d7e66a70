"""A torchrun whose ranks are forks of it, so that a group imports torch and diffusers once and shares their memory.

Where this process has used the GPU, which then works in no fork, a rank is started as a program, as torchrun does.
"""

import contextlib
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from svdq.producer.processes import PARENT_PID, die_with_parent
from svdq.worker import __main__ as rank_program  # before torch, whose import it prepares
from svdq.worker.config import RunConfig, read_config

POLL_S = 0.05  # seconds between looks at a rank that is to end
#: "1": torch asks NVML whether there are GPUs. If it asks CUDA, the forks of this process cannot use them.
ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class ForkedRank:
    """A rank that is a fork of this process, with the part of `subprocess.Popen` that torchrun uses."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str], *, may_use_gpus: bool) -> None:
        """Start it; the command is what torchrun would run, `python -u -m svdq.worker` and its options."""
        self._command = command
        self.returncode: int | None = None
        follow_parent = die_with_parent()
        # Set before the fork, so that what libraries do at a fork sees it.
        with _environment({**environment, ASK_NVML: ""}), warnings.catch_warnings():
            # The other thread of torchrun sleeps: it keeps the rendezvous alive once a day.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
            if self.pid == 0:
                _become_rank(command, follow_parent, may_use_gpus=may_use_gpus)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code; raises TimeoutExpired after so many seconds, if any."""
        began_at = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began_at >= timeout:
                raise subprocess.TimeoutExpired(self._command, timeout)
            time.sleep(POLL_S)
        return code


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _become_rank(command: tuple[str, ...], follow_parent: Callable[[], None] | None, *, may_use_gpus: bool) -> NoReturn:
    """Run a rank in a fork, from which nothing returns."""
    try:
        if follow_parent is not None:
            follow_parent()
        os.setsid()  # torchrun signals the process group of a rank
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)  # torchrun's handlers are not for its ranks
        signal.signal(signal.SIGINT, signal.default_int_handler)
        import torch

        if may_use_gpus and torch.cuda._is_in_bad_fork():
            os.execvp(command[0], command)  # noqa: S606 - as torchrun does
        rank_program.main(command[command.index("svdq.worker") + 1 :])
    except Exception:  # noqa: BLE001 - whatever it is, the rank ends here
        traceback.print_exc()
    finally:
        os._exit(1)


def import_for_ranks(run: RunConfig, num_ranks: int) -> None:
    """Import what the ranks of a run need."""
    from svdq.pipeline.models.families import family_named
    from svdq.worker import rank  # noqa: F401
    from svdq.worker.startup import prepare_compiling

    if run.rank.compile != "off":
        prepare_compiling(run.settings.home, num_ranks)
    model = run.model
    if model.family is not None and model.layout is not None:
        from svdq.pipeline.models.family import imported
        from svdq.pipeline.models.weights.components import check_installation

        family = family_named(model.family)
        imported(family.model)
        check_installation([family.layouts[model.layout]])


def main() -> None:
    """Run torchrun with the arguments of this process, as `GroupProcess` gives them."""
    os.environ[PARENT_PID] = str(os.getpid())
    # A name server that does not answer would take 20 s of each start.
    socket.getfqdn = lambda name="": name or socket.gethostname()
    os.environ[ASK_NVML] = "1"  # diffusers looks while it is imported, and torchrun before it starts ranks
    options = dict(itertools.pairwise(sys.argv))
    must_use_gpus = False
    with contextlib.suppress(Exception):  # what cannot be read or imported is left to the ranks: they say why
        run = read_config(Path(options["--run-dir"]))
        must_use_gpus = run.rank.device == "cuda"
        import_for_ranks(run, int(options["--nproc-per-node"]))
    import torch
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
    from torch.distributed.run import main as torchrun

    # It ends when its ranks have ended, and by no signal: where a supervisor signals every process, it would kill
    # them, with a traceback.
    api._terminate_process_handler = lambda *_: None
    # Where CUDA finds no driver, torch says so in a program, and not in a fork.
    start = partial(ForkedRank, may_use_gpus=torch.cuda.is_available() or must_use_gpus)
    SubprocessHandler._popen = lambda _, args, env: start(args, env)  # type: ignore[assignment,method-assign,return-value]
    gc.freeze()
    gc.enable()
    try:
        torchrun()
    finally:
        gc.unfreeze()  # nanobind's modules, as Triton is, print what is frozen at the end as leaked


if __name__ == "__main__":
    main()
