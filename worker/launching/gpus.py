"""The GPUs that ranks will see, told by NVIDIA's tool: torch, which knows them too, takes seconds to import."""

import os
import re
import subprocess


def num_gpus() -> int:
    """Count the GPUs that the ranks will see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in {"", "-1"}])
    return len(gpu_names())


def gpu_names() -> list[str]:
    """Name all GPUs of this machine as torch names them, such as "NVIDIA RTX A5000"."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return []
    if listed.returncode:
        return []
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID: .*)?$", listed.stdout, re.MULTILINE)
