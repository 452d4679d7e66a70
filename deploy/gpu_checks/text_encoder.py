"""Measures Wan's text encoder, UMT5 XXL, with random weights: `python -m gpu_checks.text_encoder` in deploy.

Time and memory do not depend on weights, and 11 GB need not be written to a disk and read again for it.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

#: As published with Wan2.2-I2V-A14B-Diffusers; on a processor, a narrow one only tries this.
CONFIG: dict[str, Any] = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24}
CONFIG |= {"num_heads": 64, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
NARROW = {"vocab_size": 1000, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
TOKENS = 512


def main() -> None:
    """Measure prompts of all tokens, and write figures by what they are."""
    from transformers import UMT5Config, UMT5EncoderModel

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    config = UMT5Config(**CONFIG | ({} if on_gpu else NARROW))
    with torch.device("meta"):
        model = UMT5EncoderModel(config).to(torch.bfloat16)
    model = model.to_empty(device=options.device).eval()
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        ids = torch.randint(config.vocab_size, (1, TOKENS), device=options.device)
        seconds = []
        for _ in range(options.repeats + 1):
            started = time.perf_counter()
            model(ids, torch.ones_like(ids))
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    weights = sum(parameter.nbytes for parameter in {id(each): each for each in model.parameters()}.values())
    found = {"seconds of a prompt": f"{statistics.median(seconds[1:]):.4f}", "GB of weights": f"{weights / 1e9:.2f}"}
    if on_gpu:
        found["GB at the peak besides"] = f"{(torch.cuda.max_memory_allocated() - weights) / 1e9:.2f}"
    options.json.write_text(json.dumps(found), encoding="utf-8")
    print(found)  # noqa: T201


if __name__ == "__main__":
    main()
