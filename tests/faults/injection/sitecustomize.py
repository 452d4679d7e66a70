"""Python loads a module of this name by itself at its start: here it puts faults into the ranks of a campaign.

The harness puts this folder on a worker's PYTHONPATH, so that svdq itself has no switch for faults. FAULTS_AT says
where, FAULTS_FOLDER names a folder through which the harness counts and controls:

- windows (`after-pop`, …): the process kills itself there, every second time it comes by (every fourth or less often in
  `after-rename`, `during-…` and `frames-in-transit`), while files `kill*` are left; each kill uses one up;
- `ltx-encode` and `ltx-decode`: the same in the first encode or decode of a model of LTX-2;
- `rounds`: the process kills itself in the phase that the suffix of the next `kill*` file names;
- `poison-PHASE`: the process kills itself in that phase of each job whose photo is `poison.jpg` in that folder; where
  the photo is not at hand, the video has POISON_FRAMES frames or its files are named after the photo;
- `seeds`: FAULTS_SEEDS, such as `kill=13,nan=5`, names videos by their seeds: in the fourth step of one, or in the last
  if it has fewer, the process kills itself or hangs (`hang`); or its latents become NaN;
- `full` and `slow`: while the file `on` is there, writes to the storage fail with ENOSPC, or take two seconds;
- `device`: ranks take the names in CUDA_VISIBLE_DEVICES for GPUs and compute on processors; a GPU fails for good, for
  its rank and for the launcher's test, while there is a file of its name; the rank dies, or waits in the kernel if that
  is a named pipe;
- `often`: a rank saves a video after each five seconds of denoising;
- `memory`: ranks take the names in CUDA_VISIBLE_DEVICES for GPUs and compute on processors; while there is a file
  `taken`, another program has most of their memory, and steps run out of it; a file `load` has the next load do so;
- `clock`: the wall clock of all processes, the launcher included, is shifted by the seconds in the file `offset`.
"""

import errno
import functools
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOW_S = 2.0  # seconds that a write takes on a slow storage
HALF_A_LOAD_S = 0.1  # seconds of a load before a kill during it
#: A kill in a phase of a job strikes at this visit. The suspects of the kill before come first, and a job that is
#: struck twice would rightly be set aside.
PHASE_VISITS = 4
KEEP_EVERY_S = 5.0  # seconds of denoising after which a video is saved where that happens often
POISON_FRAMES = 3  # frames of a poisoned video; all others have another number


def _wrap(
    owner: object, name: str, *, before: Callable[..., object] | None = None, after: Callable[[], object] | None = None
) -> None:
    """Have a function call another one with its arguments before, or one without after."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(*arguments, **named)
        answer = original(*arguments, **named)
        if after is not None:
            after()
        return answer

    setattr(owner, name, wrapped)


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_if(owner: object, name: str, is_poison: Callable[..., bool]) -> None:
    """Have a function kill the process when its arguments say so."""
    _wrap(owner, name, before=lambda *given, **named: is_poison(*given, **named) and _die())


def _poison(phase: str, folder: Path) -> None:
    from svdq.pipeline.media import video
    from svdq.pipeline.models.simulated import SimulatedModel
    from svdq.producer.decoder import Decoder

    match phase:
        case "prepare":
            poison = (folder / "poison.jpg").read_bytes()
            _kill_if(Decoder, "prepare", lambda _, data, *__: data == poison)
        case "encode":
            _kill_if(SimulatedModel, "encode", lambda _, photo, parameters: parameters.frames == POISON_FRAMES)
        case "warm-up":
            _kill_if(SimulatedModel, "warm_up", lambda _, parameters: parameters.frames == POISON_FRAMES)
        case "decode":
            _kill_if(SimulatedModel, "decode", lambda _, tensors, parameters, size: parameters.frames == POISON_FRAMES)
        case "write":
            _kill_if(video, "write_video", lambda frames, path, *_, **__: path.name.startswith("poison"))
        case _:
            raise ValueError(f"There is no phase {phase!r} to kill in.")


def _harm_seeds(seeds: dict[str, int]) -> None:
    """Have the simulated model kill the process, hang or compute NaN in a step of the videos of some seeds."""
    from svdq.pipeline.models.simulated import SimulatedModel

    denoiser, step = SimulatedModel.denoiser, SimulatedModel.step
    present = [0, 0]  # the seed of the present video, and the step in which it does harm

    def prepare(model: Any, state: Any, parameters: Any, step_costs: Any) -> Any:
        present[:] = parameters.seed, min(3, parameters.steps - 1)
        return denoiser(model, state, parameters, step_costs)

    def harmful_step(model: Any, state: Any, index: int) -> Any:
        seed, late = present
        if seed == seeds.get("kill") and index == late:
            _die()
        if seed == seeds.get("hang") and index == late:
            threading.Event().wait()
        if seed != seeds.get("nan"):
            return step(model, state, index)
        return {"latents": state["latents"].fill_(math.nan)}

    SimulatedModel.denoiser, SimulatedModel.step = prepare, harmful_step  # type: ignore[method-assign]


def _break_devices(folder: Path) -> None:
    import torch

    from svdq.pipeline.errors import InputError
    from svdq.pipeline.models.simulated import SimulatedModel
    from svdq.worker import startup

    names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    broken = folder / names[int(os.environ["LOCAL_RANK"]) % len(names)]

    def choose_device(_wanted: str, rank: int) -> torch.device:
        if broken.exists():
            raise InputError(f"The GPU of rank {rank} cannot be used: it is broken.")
        return torch.device("cpu")

    def fails(*_: object) -> bool:
        if broken.is_fifo():
            # vfork: the parent waits for its child, which waits for a writer.
            os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, broken, os.O_RDONLY, 0)])
        return broken.exists()

    startup.choose_device = choose_device
    _kill_if(SimulatedModel, "step", fails)


def _take_memory(folder: Path) -> None:
    import torch

    from svdq.pipeline.errors import NoRoomError
    from svdq.pipeline.models.simulated import SimulatedModel
    from svdq.worker import rank, startup

    def bytes_in_reach(_: torch.device) -> int:
        return (4 if (folder / "taken").exists() else 24) * 10**9

    def run_out(*_: object) -> None:
        if (folder / "taken").exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def load(*_: object, **__: object) -> None:
        if (folder / "load").exists():
            (folder / "load").rename(folder / "taken")
            raise NoRoomError("The model cannot be loaded: memory ran out.")

    startup.choose_device = lambda *_: torch.device("cpu")
    rank.bytes_in_reach = bytes_in_reach
    _wrap(SimulatedModel, "step", before=run_out)
    _wrap(startup, "open_model", before=load)


def _shift_clock(folder: Path) -> None:
    """Shift what Python's time and datetime say; the monotonic clocks go on undisturbed."""
    import datetime

    real_time, real_time_ns, real = time.time, time.time_ns, datetime.datetime

    def offset_s() -> float:
        try:
            return float((folder / "offset").read_text() or 0)
        except FileNotFoundError:
            return 0.0

    class AnyDatetime(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    class ShiftedDatetime(real, metaclass=AnyDatetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return real.now(tz) + datetime.timedelta(seconds=offset_s())

        @classmethod
        def utcnow(cls) -> datetime.datetime:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    time.time = lambda: real_time() + offset_s()
    time.time_ns = lambda: real_time_ns() + int(offset_s() * 1e9)
    for module in [*sys.modules.values()]:
        if getattr(module, "datetime", None) is real:
            module.datetime = ShiftedDatetime  # type: ignore[attr-defined]


def _killer(folder: Path, every: int = 2) -> Callable[[], None]:
    visits = 0

    def pass_by(*_: object, **__: object) -> None:
        nonlocal visits
        visits += 1
        left = sorted(folder.glob("kill*"))
        if visits % every == 0 and left:
            left[0].rename(left[0].with_name(f"done-{left[0].name}"))
            _die()

    return pass_by


def _kill_in_rounds(folder: Path) -> None:
    """Kill in the phase that is next: in the middle of a load, or at the fourth video or 30th step that comes by."""
    from svdq.pipeline.media import video
    from svdq.pipeline.models.simulated import SimulatedModel

    def kill_in(phase: str, every: int) -> Callable[[], None]:
        kill = _killer(folder, every)

        def pass_by(*_: object, **__: object) -> None:
            left = sorted(folder.glob("kill*"))
            if left and left[0].suffix == f".{phase}":
                kill()

        return pass_by

    in_step = {expert: kill_in(expert, 30) for expert in ("simulated", "simulated_2")}
    in_load = {components: kill_in(f"load-{components}", 1) for components in ("encoders", *in_step)}

    def load_half(_: object, components: str) -> None:
        time.sleep(HALF_A_LOAD_S)
        in_load.get(components, time.time)()

    _wrap(SimulatedModel, "step", before=lambda model, *_: in_step[model._held]())
    _wrap(SimulatedModel, "hold", before=load_half)
    _wrap(video, "write_video", before=kill_in("write", _write_visits()))
    _wrap(SimulatedModel, "encode", before=kill_in("encode", PHASE_VISITS))
    _wrap(SimulatedModel, "decode", before=kill_in("decode", PHASE_VISITS))


def _write_visits() -> int:
    """Return at which visit to kill a writer: after all videos that were being written, and one that was decoded."""
    from svdq.worker.rank import num_writers

    return num_writers() + 2


def _decode_before_the_last_rank() -> None:
    """Have ranks decode that do not write."""
    from svdq.pipeline.loop import admission

    def bounds_without_last(segments: Any, components: Any, *_: Any) -> list[tuple[int, int]]:
        end = segments[-1].stop + 2
        return [(0, end)] * (len(components) - 1) + [(end, end)]

    admission.bounds_of = bounds_without_last  # type: ignore[assignment]


def _kill_when_frames_arrive(kill: Callable[[], None]) -> None:
    from svdq.pipeline.transport.links import Channel
    from svdq.pipeline.transport.message import Kind, Message

    receive = Channel.receive

    def receive_or_die(channel: Channel) -> Message:
        message = receive(channel)
        if message.kind is Kind.FRAMES:
            kill()
        return message

    Channel.receive = receive_or_die  # type: ignore[method-assign]


def _refuse(folder: Path, *_: object, **__: object) -> None:
    if (folder / "on").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _dawdle(folder: Path, *_: object, **__: object) -> None:
    if (folder / "on").exists():
        time.sleep(SLOW_S)


def _install(where: str, folder: Path) -> None:
    from svdq.pipeline.media import video
    from svdq.pipeline.models.simulated import SimulatedModel
    from svdq.producer.decoder import Decoder
    from svdq.producer.storage import local, storage
    from svdq.worker.queue.group_worker import GroupWorker

    match where:
        case "after-pop":  # taken off the queue, nothing else
            _wrap(GroupWorker, "_begin", before=_killer(folder))
        case "after-admission":  # its execution is registered, nobody works on it
            _wrap(GroupWorker, "_begin", after=_killer(folder))
        case "after-rename":  # the video has its final name, its sidecar is not written
            _wrap(storage.Storage, "publish", after=_killer(folder, _write_visits()))
        case "before-acknowledgement":  # all files are there, Redis does not know
            _wrap(GroupWorker, "finish", before=_killer(folder))
        case "during-prepare":
            _wrap(Decoder, "prepare", before=_killer(folder, PHASE_VISITS))
        case "during-encode":
            _wrap(SimulatedModel, "encode", before=_killer(folder, PHASE_VISITS))
        case "during-decode":
            _decode_before_the_last_rank()
            _wrap(SimulatedModel, "decode", before=_killer(folder, PHASE_VISITS))
        case "frames-in-transit":  # their header has arrived on the last rank, they have not
            _decode_before_the_last_rank()
            _kill_when_frames_arrive(_killer(folder, PHASE_VISITS))
        case "during-write":
            _wrap(video, "write_video", after=_killer(folder, _write_visits()))
        case "ltx-encode" | "ltx-decode":
            from svdq.pipeline.models.ltx.model import LtxModel

            _wrap(LtxModel, where.removeprefix("ltx-"), before=_killer(folder, 1))
        case "rounds":
            _kill_in_rounds(folder)
        case "full":
            _wrap(local, "publish", before=functools.partial(_refuse, folder))
        case "slow":
            _wrap(local, "publish", before=functools.partial(_dawdle, folder))
        case "often":
            from svdq.pipeline.loop.stage import Stage

            Stage.__init__.__kwdefaults__["keep_every_s"] = KEEP_EVERY_S
        case "device":
            _break_devices(folder)
        case "memory":
            _take_memory(folder)
        case "clock":
            _shift_clock(folder)
        case "seeds":
            items = (item.split("=") for item in os.environ["FAULTS_SEEDS"].split(","))
            _harm_seeds({kind: int(seed) for kind, seed in items})
        case _ if where.startswith("poison-"):
            _poison(where.removeprefix("poison-"), folder)
        case _:
            raise ValueError(f"There is no point {where!r} to put a fault into.")


_installed: list[str] = []


def _install_in_rank() -> None:
    """Install the fault once; torchrun gives its ranks RANK."""
    if "RANK" not in os.environ or _installed:
        return
    _installed.append(os.environ["FAULTS_AT"])
    try:
        _install(os.environ["FAULTS_AT"], Path(os.environ.get("FAULTS_FOLDER", "")))
    except Exception:  # noqa: BLE001 - whatever it is
        # Python would print this and go on without the fault.
        traceback.print_exc()
        os._exit(1)


match os.environ.get("FAULTS_AT"):
    case "device" | "memory" if "svdq.worker.doctor" in sys.orig_argv:
        is_broken = Path(os.environ["FAULTS_FOLDER"], sys.orig_argv[-2]).exists()
        sys.stderr.write("it is broken\n" * is_broken)
        os._exit(is_broken)
    case "clock" if "svdq.worker.agent" not in sys.orig_argv:
        _shift_clock(Path(os.environ["FAULTS_FOLDER"]))
    case None:
        pass
    case _:
        _install_in_rank()
        os.register_at_fork(after_in_child=_install_in_rank)
