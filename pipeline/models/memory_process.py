"""Estimates of memory from a process of their own: `python -m svdq.pipeline.models.memory_process WHAT`.

An estimate runs Python for up to some seconds. In a thread of a rank it would take the interpreter from the one that
feeds the GPU, after each of a step's thousands of operations. Knows nothing of ranks and jobs.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

from svdq.pipeline.errors import UnavailableError
from svdq.pipeline.models.compute import ComputeOptions

#: Seconds that an answer may take, with the start of the process; on a busy machine a start takes half a minute.
PATIENCE_S = 180.0
#: Times that the process may fail before it is not started again.
MAX_FAILURES = 2
#: How much the process gives way to ranks that compute on processors.
NICE = 10


class EstimatorProcess:
    """`memory_plan.Estimates` of one model; each is asked for once and remembered. For one thread."""

    def __init__(self, name: str, dtype: torch.dtype, device_type: str, options: ComputeOptions) -> None:
        """Start the process, which takes seconds, and do not wait for it; arguments are `MemoryEstimator`'s."""
        self._what = json.dumps(
            {
                "name": name,
                "dtype": str(dtype).removeprefix("torch."),
                "device_type": device_type,
                "options": asdict(options),
            }
        )
        self._known: dict[str, int] = {}
        self._num_failures = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def weights(self, encoder: bool, decoder: bool) -> int:
        """See `memory_plan.Estimates`, and for the others too.

        Raises:
            UnavailableError: the process does not answer, or cannot tell.
        """
        return self._ask("weights", encoder, decoder)

    def encode(self, decoder: bool, width: int, height: int) -> int:
        """See there."""
        return self._ask("encode", decoder, width, height)

    def step(self, width: int, height: int, frames: int, guided: bool, chunked: bool = False) -> int:
        """See there."""
        return self._ask("step", width, height, frames, guided, chunked)

    def decode(self, width: int, height: int, frames: int, decode_chunk_size: int) -> int:
        """See there."""
        return self._ask("decode", width, height, frames, decode_chunk_size)

    def close(self) -> None:
        """End the process; it would end with this one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
        )
        return self._process

    def _ask(self, *question: str | int) -> int:
        line = json.dumps(question)
        if line not in self._known:
            if self._num_failures >= MAX_FAILURES:
                raise UnavailableError("The process that estimates memory has failed before.")
            try:
                answer = json.loads(self._exchange(line))
            except (OSError, ValueError) as error:
                self._num_failures += 1
                self.close()
                raise UnavailableError(f"The process that estimates memory has failed: {error}.") from error
            if "error" in answer:
                raise UnavailableError(f"What a video takes in memory cannot be estimated: {answer['error']}")
            self._known[line] = int(answer["bytes"])
        return self._known[line]

    def _exchange(self, line: str) -> bytes:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n".encode())
        answer = b""
        while not answer.endswith(b"\n"):
            if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
                raise TimeoutError(f"no answer within {PATIENCE_S:.0f} s")
            part = process.stdout.read(4096)
            if not part:
                raise ConnectionError("it has ended")
            answer += part
        return answer


def main(what: str) -> None:
    """Answer questions on stdin, a line of JSON each, until it is closed."""
    os.nice(NICE)
    # Whatever a library prints goes to the log; the answers go where stdout was.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        from svdq.pipeline.models.memory import MemoryEstimator
        from svdq.pipeline.models.model import Part

        arguments = json.loads(what)
        options = arguments.pop("options")
        estimator = MemoryEstimator(
            arguments["name"],
            getattr(torch, arguments["dtype"]),
            arguments["device_type"],
            ComputeOptions(**options | {"approximate": tuple(options["approximate"])}),
        )

        def parts(encoder: bool, decoder: bool) -> Part:
            return Part.DENOISER | (Part.ENCODER if encoder else Part(0)) | (Part.DECODER if decoder else Part(0))

        ways: dict[str, Callable[..., int]] = {
            "weights": lambda encoder, decoder: estimator.weights(parts(encoder, decoder)),
            "encode": lambda decoder, *size: estimator.encode(parts(True, decoder), *size),
            "step": estimator.step,
            "decode": estimator.decode,
        }
        for line in sys.stdin:
            way, *arguments = json.loads(line)
            try:
                answer: dict[str, object] = {"bytes": ways[way](*arguments)}
            except Exception as error:  # noqa: BLE001 - no video fails because it could not be estimated
                answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
