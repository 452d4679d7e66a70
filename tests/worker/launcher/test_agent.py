"""How torchrun starts ranks: as forks, or as programs of their own where forks cannot use the GPU."""

import pytest

pytestmark = pytest.mark.slow

#: A module that Python loads at its start: on a machine with a GPU, an import has used it, or a look for it would.
GPU = """
import os, sys

def forget_the_gpu():
    torch.cuda._is_in_bad_fork = lambda: True

def look():
    if os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] != "1":
        os.register_at_fork(after_in_child=forget_the_gpu)
    return True

if "svdq.worker.agent" in sys.orig_argv:
    import torch
    torch.cuda.is_available = look
    torch.cuda._device_count_nvml = lambda: 1  # where there is a GPU, there is NVML
"""
USED = """
    os.register_at_fork(after_in_child=forget_the_gpu)
"""


@pytest.mark.parametrize(
    ("machine", "program"), [("", "svdq.worker.agent"), (GPU, "svdq.worker.agent"), (GPU + USED, "svdq.worker")]
)
def test_ranks_are_forks_unless_an_import_has_used_the_gpu(site, machine: str, program: str) -> None:
    (site.folder / "sitecustomize.py").write_text(machine)
    group = site.start(2, model="simulated:step_ms=1", PYTHONPATH=str(site.folder))
    command = group.ranks()[1].cmdline()
    assert command[command.index("-m") + 1] == program
    assert site.wait([site.submit()])[0].status == "finished"
    group.ranks()[1].kill()
    group.ready(times=2)
    assert group.stop(15)[0] == 0, group.text
