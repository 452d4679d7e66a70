"""`python -m svdq.worker.probe DEVICE PARENT`: compute a little on a GPU; exit code 1 and the reason if that fails.

In a process of its own, since a broken GPU may crash its process, or hang it beyond any signal.
"""

import os
import signal
import sys
import warnings

from svdq.producer.processes import die_with_parent

#: Side of the matrices, 64 MiB each; sums of so many ones are exact.
SIDE = 4096


def main(device: str, parent: int) -> None:
    """Multiply matrices on one device, named as in CUDA_VISIBLE_DEVICES, and check the product."""
    follow_parent = die_with_parent(signal.SIGKILL, parent=parent)
    if follow_parent is not None:
        follow_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = device  # before torch looks for devices
    warnings.simplefilter("ignore")
    import torch

    from svdq.pipeline.models.device_memory import is_out_of_memory

    try:
        ones = torch.ones((SIDE, SIDE), device="cuda")
        is_right = bool((ones @ ones == SIDE).all())
    except Exception as error:  # noqa: BLE001 - torch raises many types
        if is_out_of_memory(error):
            return  # other programs use it, which shows that it works
        sys.exit(str(error).strip().partition("\n")[0] or type(error).__name__)
    if not is_right:
        sys.exit("it multiplies wrongly")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
