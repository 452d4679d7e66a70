"""Whether a model can be used, before any rank starts. Imports no torch."""

from svdq.pipeline.models.folder_check import check_folder
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.names import has_weights, timings_of
from svdq.pipeline.models.options import WEIGHTS


def check_model(name: str, *, on_gpus: bool | None = None, dtype: str = "auto") -> None:
    """Check before seven ranks start that a model is on this machine and whole, as far as that is seen without torch.

    Args:
        name: as in SVDQ_MODEL.
        on_gpus: whether the ranks compute on GPUs, for which half precision weights do; None when it is not known.
        dtype: what they are told to compute in, as in `ComputeOptions`.

    Raises:
        InputError: it is not.
    """
    if has_weights(name):
        half = WEIGHTS.get(dtype, None if on_gpus is None else WEIGHTS["fp16" if on_gpus else "fp32"])
        check_folder(find_folder(name), name, half=half)
    elif name != "preview":
        timings_of(name)
