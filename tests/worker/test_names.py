"""Names and folders of videos from a real submission to the storage and to a fetched folder."""

import re
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.slow

#: Stems that Windows refuses, or changes.
REFUSED = ("CON", "nul", "com1.x", "LPT9", "a:b", "a?b*", 'a"b', "a<b>", "a|b", "a\\b", "end. .")
_ALLOWED = re.compile(
    r'(?!(?:CON|NUL|COM\d|LPT\d)(?:\.|$))[^<>:"/\\|?*\x00-\x1f]*[^<>:"/\\|?*\x00-\x1f. ]', re.IGNORECASE
)
FLAGS = ("--family", "svd", "--frames", "2", "--steps", "1", "--size", "64x64", "--format", "gif")


def write(folder: Path, *stems: str, shade: int = 0) -> None:
    """Write photos of which no two are the same."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, stem in enumerate(stems):
        Image.new("RGB", (64, 48), (number, shade, 0)).save(folder / f"{stem}.png")


def render(site) -> None:
    assert site.start(1, "--burst", model="simulated:step_ms=0", wait=False).end() == 0, site.groups[-1].text


def test_photos_in_folders_arrive_in_folders_with_names_of_the_template(site) -> None:
    stems = {"Berlin": 7, "Rome": 7, "São Paulo": 6}
    for shade, (folder, number) in enumerate(stems.items()):
        write(site.folder / "trip" / folder, *(f"img {each}" for each in range(number)), shade=shade)
    done = site.run(
        "svdq", "submit", "trip", "--recursive", *FLAGS, "--seed", "7", "--output", "{folder}/{photo}-{seed}"
    )
    assert done.returncode == 0, done.stderr
    render(site)
    done = site.run("svdq", "fetch", "--all", "--output", "videos/{folder}/{photo}")
    assert done.returncode == 0, done.stderr
    outputs = Path(site.settings.storage) / "outputs"
    for folder, number in stems.items():
        names = [re.sub(r"-[0-9a-f]{20}\.gif$", "", path.name) for path in (outputs / folder).glob("*.gif")]
        assert sorted(names) == sorted(f"img {each}-7" for each in range(number))
        fetched = [path.stem for path in (site.folder / "videos" / folder).glob("*.gif")]
        assert sorted(fetched) == sorted(f"img {each}" for each in range(number))


@pytest.mark.long
def test_names_that_windows_refuses_are_replaced(site) -> None:
    write(site.folder / "names", *REFUSED)
    done = site.run("svdq", "submit", "names", *FLAGS, "--output", "{photo}/{photo}")
    assert done.returncode == 0, done.stderr
    render(site)
    assert site.run("svdq", "fetch", "--all", "--output", "videos/{photo}").returncode == 0
    for root in (Path(site.settings.storage) / "outputs", site.folder / "videos"):
        found = list(root.rglob("*"))
        assert len([path for path in found if path.suffix == ".gif"]) == len(REFUSED)
        assert [path.name for path in found if not _ALLOWED.fullmatch(path.name)] == []
