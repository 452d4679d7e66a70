"""Moves the components of a model between host memory and its device, which holds one set of them at a time.

A component for which host memory has no room is dropped, and read again from its files when it is needed.
"""

import gc
import os
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BUFFER_BYTES = 64 * 2**20  # of each of two pinned buffers for weights: one is filled, the other copied

_Copies = dict[int, Tensor]  # weights in host memory by the addresses of those on the device


class Residency:
    """Loads components on demand, and keeps those that leave the device in host memory as long as it has room."""

    def __init__(self, device: torch.device, host_bytes: int, load: Callable[[str], Any]) -> None:
        """Begin without components; `load` reads one from its files onto the device."""
        self._device = device
        self._host_bytes = host_bytes
        self._load = load
        #: The components that are in memory, and the names of those that are in use.
        self._there: dict[str, nn.Module] = {}
        self._here: set[str] = set()
        #: Of those that host memory has room for: the copies there, and their bytes.
        self._copies: dict[str, _Copies] = {}
        self._bytes: dict[str, int] = {}
        self._copy = Uploader(device, BUFFER_BYTES) if device.type == "cuda" else None

    @torch.inference_mode(mode=False)
    def hold(self, wanted: Collection[str], *, is_kept: Callable[[str], bool]) -> dict[str, nn.Module | None]:
        """Bring components to the device, others off it; return those that changed, None for a dropped one."""
        changed: dict[str, nn.Module | None] = {}
        for name in self._here - set(wanted):
            self._here.discard(name)
            if not (is_kept(name) and self._keep(name)):
                del self._there[name]
                changed[name] = None
        if changed:
            gc.unfreeze()  # it may be one of those that were there before the loop
        gc.collect()  # hooks of a module refer to it
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what comes now has tensors of other sizes
        for name in wanted:
            if name not in self._there:
                self._there[name] = changed[name] = self._load(name)
            elif name not in self._here and self._copy is not None:
                self._copies[name] = move_in(self._there[name], self._copy)
            self._here.add(name)
        return changed

    def _keep(self, name: str) -> bool:
        """Put a component into host memory; return False if there is no room for it."""
        module = self._there[name]
        if name not in self._copies:
            num_bytes = sum(part.nbytes for part in _parts(module))
            if sum(self._bytes.values()) + num_bytes > self._host_bytes:
                return False
            self._bytes[name] = num_bytes
            self._copies[name] = {} if self._copy is None else copies_of(module)
        if self._copy is not None:
            move_out(module, self._copies[name])
        return True

    def reads_again(self, name: str) -> bool:
        """Return whether a component is to be read from its files."""
        return name not in self._there


def _parts(module: nn.Module) -> Iterable[Tensor]:
    """Return the weights of a component, each once."""
    return {weight.data_ptr(): weight for weight in (*module.parameters(), *module.buffers())}.values()


def copies_of(module: nn.Module) -> _Copies:
    """Copy all weights of a component to host memory."""
    return {part.data_ptr(): part.detach().to("cpu", copy=True) for part in _parts(module)}


def move_in(module: nn.Module, copy: Callable[[Tensor], Tensor]) -> _Copies:
    """Replace each weight of a component by a `copy` of it; return the weights for `move_out`."""
    copies: _Copies = {}

    def moved(part: Tensor) -> Tensor:
        if part.numel() and part.data_ptr() in copies:
            return part  # tied to one before
        new = copy(part)
        copies[new.data_ptr()] = part
        return new

    _replace_all(module, moved)
    return copies


def move_out(module: nn.Module, copies: _Copies) -> None:
    """Replace each weight of a component by its copy in host memory."""

    def moved(part: Tensor) -> Tensor:
        return copies.get(part.data_ptr(), part) if part.numel() else part  # empty ones have no address

    _replace_all(module, moved)


def _replace_all(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the data of all weights in place: compiled code refers to the weights themselves."""
    for weight in [*module.parameters(), *module.buffers()]:
        weight.data = change(weight.detach())


class Uploader:
    """Copies tensors from pageable host memory to a GPU: the bus waits neither for the processor nor for a file."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if on_gpu else []
        self._turn = 0

    def __call__(self, source: Tensor) -> Tensor:
        """Return a copy on the device; later work in its current stream waits for it."""
        target = torch.empty_like(source, device=self._device)
        if not source.is_contiguous() or not source.numel():
            return target.copy_(source)
        from_bytes, to_bytes = source.reshape(-1).view(torch.uint8), target.reshape(-1).view(torch.uint8)
        for there, here in zip(
            from_bytes.split(len(self._buffers[0])), to_bytes.split(len(self._buffers[0])), strict=True
        ):
            buffer = self._buffers[self._turn][: len(there)]
            if self._events:
                self._events[self._turn].synchronize()  # what it had before has arrived
            buffer.copy_(there)
            here.copy_(buffer, non_blocking=True)
            if self._events:
                self._events[self._turn].record(torch.cuda.current_stream(self._device))
            self._turn = 1 - self._turn
        return target


def read_ahead(files: Iterable[Path]) -> None:
    """Have the kernel read files into its page cache, in a thread."""

    def run() -> None:
        for file in files:
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError:
                continue  # whoever loads it says why
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    threading.Thread(target=run, name="read-ahead", daemon=True).start()
