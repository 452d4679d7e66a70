"""Scripts in place of nvidia-smi."""

from collections.abc import Callable, Mapping
from pathlib import Path

PutNvidiaSmi = Callable[[str], Path]


def nvidia_smi_of(*gpus: tuple[int, int, Mapping[int, tuple[object, str]]]) -> str:
    """Return a script in place of nvidia-smi on GPUs of some MiB, free ones, and processes with theirs and names."""
    listing, rows, log = [], [], ['<?xml version="1.0" ?>', "<nvidia_smi_log>"]
    for number, (total, free, processes) in enumerate(gpus):
        uuid = f"GPU-{'abc'[number]}"
        listing.append(f"GPU {number}: RTX 4090 (UUID: {uuid})")
        rows.append(f"{number}, RTX 4090, {total}, {free}")
        log.append(f"<gpu><uuid>{uuid}</uuid><fb_memory_usage><total>{total} MiB</total><free>{free} MiB</free>")
        log.append("</fb_memory_usage><processes>")
        for pid, (held, name) in processes.items():
            used = f"{held} MiB" if isinstance(held, int) else held
            log.append(f"<process_info><pid>{pid}</pid><type>C+G</type><process_name>{name}</process_name>")
            log.append(f"<used_memory>{used}</used_memory></process_info>")
        log.append("</processes></gpu>")
    answers = {"-L": listing, "'-q -x'": [*log, "</nvidia_smi_log>"], "*": rows}
    cases = ("{}) cat <<'END'\n{}\nEND\n;;".format(asked, "\n".join(lines)) for asked, lines in answers.items())
    return 'case "$*" in\n{}\nesac'.format("\n".join(cases))
