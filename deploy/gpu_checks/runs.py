"""Section `runs`: tiny models make the same videos on one rank, on several, bound, in rounds and after a kill -9."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import PIL.Image

from gpu_checks.check import PHOTO, Check, difference, write_once
from svdq.pipeline.models.families import FAMILIES
from svdq.pipeline.models.family import Family, imported

#: Frames that all families can make, and the options of each.
VIDEO = ["--size", "128x128", "--frames", 9]
OPTIONS = {"svd": ["--steps", 8], "wan": ["--steps", 8], "ltx": ["--format", "wav"]}
#: Photos of the task with a kill -9, and how many of them are videos by then.
PHOTOS, DONE_BEFORE_KILL = 6, 2


def runs(check: Check) -> None:
    """Compare each way to render with one rank; a family beside the others, as most of the time is that of starts."""
    ranks = 7 if check.on_gpu else 2
    for family in FAMILIES:
        tiny(check, family)  # once, for all threads
    todo = [
        partial(check.task, "`svdq doctor`", partial(_doctor, check)),
        partial(check.task, "Tiny Wan with a kill -9", partial(_kill, check, ranks)),
        *(partial(_ways, check, family, ranks) for family in FAMILIES),
    ]
    with ThreadPoolExecutor(len(todo), thread_name_prefix="runs") as pool:
        for done in [pool.submit(each) for each in todo]:
            done.result()


def _ways(check: Check, family: Family, ranks: int) -> None:
    ways = {f"{ranks} ranks": ["--ranks", ranks]}
    if family.experts:
        ways["bound ranks"] = ["--ranks", ranks, "--experts", "bound"]
        ways["one rank in rounds"] = ["--ranks", 1, "--experts", "rounds"]
    for way, worker in ways.items():
        what = f"Largest pixel difference of the tiny {family.name} on {way} to one rank"
        check.task(what, partial(_compare, check, what, family, way, worker))


def tiny(check: Check, family: Family) -> str:
    """Write the untrained model of a family."""
    return str(write_once(check.folder / f"tiny-{family.name}", imported(family.tiny)))


def _doctor(check: Check) -> None:
    with check.home("doctor", tiny(check, FAMILIES[0])) as environment:
        check.run("svdq.cli", "doctor", environment=environment)
    check.figure("`svdq doctor`", "ok", "ok", good=True)


def _compare(check: Check, what: str, family: Family, way: str, worker: list[object]) -> None:
    jobs = [[PHOTO, *VIDEO, *OPTIONS[family.name]]]
    model, made = tiny(check, family), []
    for each, options in (("1", ["--ranks", 1]), (way.replace(" ", "-"), worker)):
        made += check.render(f"{family.name}-{each}", model, jobs, *options, num_videos=1)
    found = difference(*made)
    check.figure(what, found, 0, good=found == 0)


def _kill(check: Check, ranks: int) -> None:
    """Render photos with a kill -9 of a rank, and again in reverse order without; compare the videos."""
    model = tiny(check, next(family for family in FAMILIES if family.name == "wan"))
    files, made = photos(check, PHOTOS), []
    for name, order, after in (("killed", files, DONE_BEFORE_KILL), ("whole", files[::-1], None)):
        jobs = [[*order, *VIDEO, *OPTIONS["wan"]]]
        found = check.render(name, model, jobs, "--ranks", ranks, num_videos=PHOTOS, kill_after=after)
        made.append({sidecar["job"]["name"]: sidecar for sidecar in found})
    most = max(difference(made[0][file.stem], made[1][file.stem]) for file in files)
    check.figure("Largest pixel difference of videos with a kill -9 to others without", most, 0, good=most == 0)
    first, second = (made[0][file.stem] for file in files[:2])
    differ = difference(first, second) > 0
    check.figure("Two photos make two videos", differ, True, good=differ)


def photos(check: Check, number: int) -> list[Path]:
    """Write different photos: parts of one."""
    files = []
    with PIL.Image.open(PHOTO) as photo:
        for index in range(number):
            files.append(check.folder / f"photo-{index}.png")
            photo.convert("RGB").crop((0, 0, photo.width - 8 * index, photo.height - 4 * index)).save(files[-1])
    return files
