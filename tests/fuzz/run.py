"""Runs one target: mutates its seeds, calls its reader, and records exceptions, hangs and growth of memory."""

import hashlib
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

#: Seconds that one input may take, its bytes at most, bytes by which resident memory may grow, and bytes of address
#: space that the process may take besides: an allocation beyond them raises MemoryError.
INPUT_S = 10
INPUT_BYTES = 4 << 20
GROWTH_BYTES = 300 << 20
ADDRESS_BYTES = 4 << 30

_ROOT = Path(__file__).parents[2]


class Hang(BaseException):
    """An input took longer than `INPUT_S`."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One reader of foreign data."""

    #: Valid input, which must be read without an exception.
    seeds: Sequence[bytes]
    #: Called with a random generator, a seed and all seeds.
    mutate: Callable[[Random, bytes, Sequence[bytes]], bytes]
    #: Raises AssertionError where what is read is wrong.
    read: Callable[[bytes], None]
    #: What the reader documents that it raises.
    allowed: tuple[type[Exception], ...]


@dataclass(kw_only=True)
class Outcome:
    """What came of one target."""

    name: str
    num_inputs: int = 0
    num_refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    growth_bytes: int = 0
    #: A sentence for each different finding, by exception and line.
    findings: dict[str, str] = field(default_factory=dict)


def run(
    name: str,
    make: Callable[[Path, ExitStack], Target],
    folder: Path,
    saved: Path,
    *,
    seed: int,
    seconds: float = 3600,
    num_inputs: int = 10**12,
) -> Outcome:
    """Run one target until the time or the number of inputs is reached.

    Args:
        name: of the target.
        make: makes it.
        folder: an empty one for its files.
        saved: where inputs that were found are written; the current input is always in its file `NAME.current`.
        seed: of the mutations.
        seconds: at most.
        num_inputs: at most.
    """
    outcome = Outcome(name=name)
    random = Random(f"{seed} {name}")
    with ExitStack() as stack:
        target = make(folder, stack)
        for data in target.seeds:  # loads what is loaded on demand, too
            target.read(data)
        current = (saved / f"{name}.current").open("wb", buffering=0)
        stack.callback(current.close)
        stack.enter_context(_limits())
        before, began = _reset_peak(), time.monotonic()
        while outcome.num_inputs < num_inputs and time.monotonic() - began < seconds:
            data = target.mutate(random, random.choice(target.seeds), target.seeds)[:INPUT_BYTES]
            current.seek(0)
            current.truncate()
            current.write(data)
            outcome.num_inputs += 1
            now = time.monotonic()
            try:
                with _alarm():
                    target.read(data)
            except target.allowed:
                outcome.num_refused += 1
            except (Exception, Hang) as error:  # noqa: BLE001 - every other exception is a finding
                _note(outcome, saved, data, error)
            outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - now)
            if outcome.num_inputs % 20 == 0 or outcome.num_inputs == num_inputs:
                growth = _status_bytes("VmHWM") - before
                if growth > max(outcome.growth_bytes, GROWTH_BYTES):
                    _note(outcome, saved, data, MemoryError(f"grew by {growth >> 20} MiB within 20 inputs"))
                outcome.growth_bytes = max(growth, outcome.growth_bytes)
        outcome.seconds = time.monotonic() - began
    (saved / f"{name}.current").unlink()
    return outcome


def _note(outcome: Outcome, saved: Path, data: bytes, error: BaseException) -> None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    ours = next((frame for frame in reversed(frames) if _is_ours(frame.filename)), None)
    last = frames[-1] if frames else None
    place = f"{type(error).__name__} at {ours and f'{Path(ours.filename).name}:{ours.lineno}'}"
    if place not in outcome.findings:
        path = saved / f"{outcome.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        raised = last and f"{Path(last.filename).name}:{last.lineno}"
        outcome.findings[place] = f"{outcome.name}: {place} ({raised}): {str(error)[:200]}; input: {path}"


@contextmanager
def _alarm() -> Iterator[None]:
    def hang(signum: int, frame: FrameType | None) -> None:
        raise Hang(f"took more than {INPUT_S} s")

    previous = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, INPUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def _limits() -> Iterator[None]:
    """Limit the address space, and treat warnings as `svdq` does, which hides them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status_bytes("VmSize") + ADDRESS_BYTES, hard))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _reset_peak() -> int:
    """Set the peak of the resident memory to what it is now, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _is_ours(path: str) -> bool:
    return _ROOT in Path(path).parents and ".venv" not in path
