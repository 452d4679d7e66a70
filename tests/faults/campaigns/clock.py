"""Wall clocks that jump, as after a suspended machine, a wrong time server or a battery that was empty."""

import time
from pathlib import Path

from tests.faults.arena import Arena
from tests.faults.group import READY

STEPS = 40
#: Seconds by which a clock jumps, twice a lease; and seconds that it stays so, longer than two beats.
JUMP_S, HOLD_S = 30.0, 8.0
OFFSETS_S = (JUMP_S, -JUMP_S)  # jumps of one group, each there and back


def clock_steps(arena: Arena) -> None:
    """The clock of one of two groups jumps forward and back: both keep their jobs, and each is rendered once."""
    arena.submit_all(steps=STEPS)
    jumping, controls = arena.start_with("clock")
    other = arena.start()
    for offset_s in OFFSETS_S:
        if arena.all_ended():
            arena.tally.notes.append("all jobs had ended before the last jump")
            break
        for moment_s in (offset_s, 0.0):
            _set(controls / "offset", moment_s)
            arena.tally.num_faults += 1
            arena.breathe(arena.size.hold_s or HOLD_S, arena.size.hold_s or HOLD_S)
    arena.settle()
    for name, group in (("the group whose clock jumped", jumping), ("the other group", other)):
        for sign in ("was canceled or taken over; this group drops it", "Took back", "taken over by another"):
            if sign in group.text:
                arena.tally.broken.append(f"{name} said {sign!r}: a lease was taken for expired")
        if group.text.count(READY) != 1:
            arena.tally.broken.append(f"{name} was started {group.text.count(READY)} times")


def _set(path: Path, offset_s: float) -> None:
    temporary = path.with_suffix(f".{time.monotonic_ns()}")
    temporary.write_text(str(offset_s))
    temporary.replace(path)
