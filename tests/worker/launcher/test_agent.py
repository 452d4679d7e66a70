"""How torchrun starts ranks: as forks, or as programs of their own where forks cannot use the GPU."""

import pytest

pytestmark = pytest.mark.slow

#: A module that Python loads at its start: an import has used the GPU.
GPU_WAS_USED = """
import os

def forget_the_gpu():
    import torch
    torch.cuda._is_in_bad_fork = lambda: True

os.register_at_fork(after_in_child=forget_the_gpu)
"""


@pytest.mark.parametrize(("used", "program"), [(False, "svdq.worker.agent"), (True, "svdq.worker")])
def test_ranks_are_forks_unless_an_import_has_used_the_gpu(site, used: bool, program: str, until) -> None:
    (site.folder / "sitecustomize.py").write_text(GPU_WAS_USED * used)
    group = site.start(2, model="simulated:step_ms=1", PYTHONPATH=str(site.folder))
    command = group.ranks()[1].cmdline()
    assert command[command.index("-m") + 1] == program
    assert site.wait([site.submit()])[0].status == "finished"
    group.ranks()[1].kill()
    group.ready(times=2)
    assert group.stop(15)[0] == 0, group.text
