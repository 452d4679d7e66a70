"""`svdq gallery`: a page that opens from disk, whatever videos are called, in a real browser where there is one."""

import io
import json
import os
import re
import shutil
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pillow_heif
import pytest
import redis
from PIL import Image

from svdq.producer.results.finished_videos import find_results
from svdq.producer.results.gallery import write_gallery
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from tests.conftest import Cli
from tests.finished import NOTICE, add_video
from tests.queued import add, fail

#: Every character that means something in HTML, in a URL or in a script.
NASTY = "a&b <img src=x onerror=alert(1)> \"q\" 'q' #1 50% ?x=1 </script> ü"


class Page(HTMLParser):
    """A page as a browser reads it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def links(self) -> list[str]:
        """Everything that the page would load or lead to."""
        names = ("href", "src", "data-src", "poster", "action")
        return [value for _, attributes in self.tags for name, value in attributes.items() if name in names and value]

    def file(self, link: str) -> Path:
        """The file that a link leads to."""
        return Path(os.path.normpath(self.path.parent / unquote(link)))


def test_the_page_shows_what_there_is(
    svdq: Cli, connection: redis.Redis, storage: Storage, photo: Path, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    picture = photo.read_bytes()
    names = {"mp4": NASTY.replace("/", "_"), "gif": "moves", "webp": "moves, too", "png": "frames"}
    for number, (kind, name) in enumerate(names.items()):
        formats = ("gif", "mp4") if kind == "mp4" else (kind,)
        add_video(
            storage,
            number,
            name=name,
            formats=formats,
            folder="a & b/<c>",
            photo=picture,
            finished_at=now - timedelta(hours=number),
        )
    fail(add(connection, 9, name=names["mp4"]), 'x.SampleError: <b>black</b> & "blue"')

    page = tmp_path / "pages/all.html"
    page.parent.mkdir()
    done = svdq("gallery", "-o", page)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{page}  4 videos, 1 failure\n", "")
    assert [path.name for path in page.parent.iterdir()] == ["all.html"]
    shown = Page(page)

    # Names are text and nothing else.
    assert shown.text.count(names["mp4"]) >= 2
    assert 'Failed: <b>black</b> & "blue"' in shown.text
    assert shown.all("b") == []
    assert [attributes for _, attributes in shown.tags if any(name.startswith("on") for name in attributes)] == []
    assert len(shown.all("script")) == 1
    assert {attributes.get("src") for attributes in shown.all("script")} == {None}

    # Everything it leads to is on this disk, by a relative path, or in the page.
    links = [link for link in shown.links() if not link.startswith("data:image/jpeg;base64,")]
    assert len(links) > 10
    assert [link for link in links if "://" in link or link.startswith("/") or not shown.file(link).exists()] == []
    assert [shown.file(str(video["data-src"])).suffix for video in shown.all("video")] == [".mp4"]
    assert all({"muted", "playsinline"} <= video.keys() and "src" not in video for video in shown.all("video"))

    cards = [attributes for attributes in shown.all("li") if attributes.get("class") == "card"]
    assert [card["data-state"] for card in cards] == ["failed"] + ["finished"] * 4
    assert [str(card["data-search"]).split(" ")[0] for card in cards[2:]] == [
        "moves",
        "moves,",
        "frames",
    ]  # newest first
    assert shown.text.count(NOTICE) == 4
    assert shown.text.count("· seed ") == 4
    for name in ("motion_bucket_id", "noise_aug_strength", "frames", "steps", "fps"):
        assert shown.text.count(name) >= 5, name
    # The photos, and words for those who do not see them.
    sources = [image for image in shown.all("img") if str(image["alt"]).startswith("Source photo of ")]
    assert len(sources) == 4
    assert all(shown.file(str(image["src"])).read_bytes() == picture for image in sources)
    assert all(image["alt"] for image in shown.all("img"))
    assert sum(str(link.get("aria-label")).startswith("Play ") for link in shown.all("a")) == 4


def test_a_card_links_to_the_sound_beside_frames(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    stem = f"outputs/photo-{add_video(storage, 1, formats=('png',))}"
    sidecar = json.loads(storage.read(f"{stem}.json"))
    sidecar["outputs"].append(storage.location(f"{stem}.wav"))
    storage.write_text(f"{stem}.json", json.dumps(sidecar))
    storage.write_bytes(f"{stem}.wav", b"RIFF")
    assert svdq("gallery", "-o", tmp_path / "page.html").returncode == 0
    shown = Page(tmp_path / "page.html")
    assert [shown.file(link).suffix for link in shown.links() if "outputs" in link and "/frame" not in link] == [
        "",
        ".wav",
    ]
    assert any(str(image["src"]).startswith("data:image/jpeg") for image in shown.all("img"))


def test_cards_show_prompts(svdq: Cli, storage: Storage, settings: Settings, tmp_path: Path) -> None:
    prompt = '</script><b>A "wave"</b> {{ x }} Käse'
    job_id = add_video(storage, 1, name="wave")
    sidecar = Path(settings.storage, "outputs", f"wave-{job_id}.json")
    document = json.loads(sidecar.read_text())
    document["job"] |= {"family": "wan", "prompt": prompt}
    sidecar.write_text(json.dumps(document))
    page = tmp_path / "all.html"
    assert svdq("gallery", "-o", page).returncode == 0
    shown = Page(page)
    assert shown.text.count(prompt) == 2  # on the card and among the parameters
    assert shown.all("b") == []
    assert prompt.lower() in shown.all("li")[0]["data-search"]


def test_a_photo_that_browsers_do_not_show_gets_a_still(
    svdq: Cli, storage: Storage, photo: Path, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    with Image.open(photo) as image:
        pillow_heif.from_pillow(image).save(buffer)
    add_video(storage, 1, photo=buffer.getvalue(), suffix="heic")
    page = tmp_path / "page.html"
    assert svdq("gallery", "-o", str(page)).returncode == 0
    sources = [str(image["src"]) for image in Page(page).all("img") if str(image["alt"]).startswith("Source photo")]
    assert [source.partition(",")[0] for source in sources] == ["data:image/jpeg;base64"]
    assert [link for link in Page(page).links() if link.endswith(".heic")]


def test_videos_of_a_photo_are_named_by_its_path_and_what_differs(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    for number, bucket in enumerate((60, 180)):
        add_video(storage, number, photo=b"one", source="holiday/day 1/<cup>.jpg", motion_bucket_id=bucket)
    add_video(storage, 2, photo=b"other", motion_bucket_id=60)
    assert svdq("gallery", "-o", tmp_path / "page.html").returncode == 0
    page = Page(tmp_path / "page.html")
    cards = [attributes for attributes in page.all("li") if attributes.get("class") == "card"]
    assert sorted(str(card["data-source"]) for card in cards) == ["holiday/day 1/<cup>.jpg"] * 2 + ["photo"]
    assert len({card["data-image"] for card in cards}) == 2
    assert "motion_bucket_id 60\n" in page.text
    assert "motion_bucket_id 180\n" in page.text
    assert page.text.count("motion_bucket_id 60\n") == 1
    assert "holiday/day 1/<cup>.jpg" in page.text
    assert {option["value"] for option in page.all("option")} >= {"", "photo"}


def test_a_folder_that_was_fetched(svdq: Cli, home: Path, tmp_path: Path) -> None:
    elsewhere = Storage(str(tmp_path / "elsewhere"))
    add_video(elsewhere, 1, folder="deep")
    shutil.copytree(tmp_path / "elsewhere/outputs", tmp_path / "fetched videos")
    page = tmp_path / "fetched videos/index.html"
    done = svdq("gallery", tmp_path / "fetched videos", "-o", page)
    assert (done.returncode, done.stderr) == (0, "")
    assert [video["data-src"] for video in Page(page).all("video")] == [f"deep/photo-{1:020x}.mp4"]
    assert not home.exists(), "no Redis was asked"


def test_a_folder_that_was_fetched_by_a_template_is_shown_whole(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    for number, formats in enumerate((("mp4", "gif"), ("gif",), ("png",))):
        add_video(storage, number, source="day 1/cup.jpg", formats=formats)
    folder = tmp_path / "videos"
    assert svdq("fetch", "--all", "-o", f"{folder}/{{folder}}/{{photo}}").returncode == 0
    done = svdq("gallery", folder, "-o", folder / "index.html")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}/index.html  3 videos, 0 failures\n", "")
    page = Page(folder / "index.html")
    files = {path for path in (folder / "day 1").iterdir() if path.suffix != ".json"}
    assert files <= {page.file(link) for link in page.links()}


def test_files_that_are_removed_meanwhile_spoil_no_page(storage: Storage, tmp_path: Path) -> None:
    for number, kind in enumerate(("mp4", "gif", "png")):
        add_video(storage, number, name=kind, formats=(kind,))
    found = list(find_results(storage))
    for result in found:
        for key in result.outputs:
            storage.remove(key)
    write_gallery(tmp_path / "page.html", storage, found, [], title="Videos")
    page = Page(tmp_path / "page.html")
    assert all(name in page.text for name in ("mp4", "gif", "png"))
    assert len(page.all("article")) == 3


def test_limit_and_since_select_videos(svdq: Cli, connection: redis.Redis, storage: Storage, tmp_path: Path) -> None:
    page = tmp_path / "some.html"
    for number in range(4):
        add_video(storage, number, finished_at=datetime.now(UTC) - timedelta(hours=3 * number))
    for flags, numbers in ((["--limit", 2], [0, 1]), (["--since", "7h"], [0, 1, 2]), (["--since", "10m"], [0])):
        assert svdq("gallery", *flags, "-o", page).returncode == 0
        files = [Path(str(video["data-src"])).stem for video in Page(page).all("video")]
        assert files == [f"photo-{number:020x}" for number in numbers]


# In a browser.


@pytest.mark.slow
def test_in_a_browser(svdq: Cli, connection: redis.Redis, storage: Storage, tmp_path: Path, browser: Any) -> None:
    for number in range(2, 40):
        add_video(storage, number, name=f"cat {number}" if number % 2 else f"dog {number}", formats=("gif",))
    add_video(storage, 1, name=NASTY.replace("/", "_"))
    fail(add(connection, 99, name="cat 99"))
    add_video(storage, 100, name="far away", finished_at=datetime.now(UTC) - timedelta(days=9))
    assert svdq("gallery", "-o", tmp_path / "all.html").returncode == 0
    page, expect = browser.new_page(), pytest.importorskip("playwright.sync_api").expect
    page.goto((tmp_path / "all.html").as_uri())
    shown = page.locator(".card:not([hidden])")
    expect(shown).to_have_count(41)
    far, near = page.locator("video[data-src*='far']"), page.locator("video:not([data-src*='far'])")
    near.scroll_into_view_if_needed()
    page.wait_for_function("video => video.readyState >= 2 && video.videoWidth === 64", arg=near.element_handle())
    assert far.get_attribute("src") is None
    frame = page.locator(".frame", has=near)
    frame.focus()
    page.wait_for_function("video => !video.paused", arg=near.element_handle())
    frame.blur()
    page.wait_for_function("video => video.paused", arg=near.element_handle())
    image = page.locator(".frame img[data-src]").first
    image.hover()
    expect(image).to_have_attribute("src", re.compile(r"\.gif$"))
    page.mouse.move(0, 0)
    expect(image).to_have_attribute("src", re.compile("^data:image/jpeg"))
    page.fill("#search", "cAt")
    expect(shown).to_have_count(20)
    expect(page.locator("#count")).to_have_text("20 of 41 shown")
    page.select_option("#state", "failed")
    page.fill("#search", "")
    expect(shown).to_have_count(1)
    page.close()


@pytest.mark.slow
def test_in_a_browser_videos_are_grouped_by_photo(svdq: Cli, storage: Storage, tmp_path: Path, browser: Any) -> None:
    now = datetime.now(UTC)
    for number, (photo, source) in enumerate([("b", "trip/10.jpg"), ("a", "trip/9.jpg"), ("b", "trip/10.jpg")]):
        finished_at = now - timedelta(hours=9 - number)
        add_video(storage, number, name=f"n{number}", photo=photo.encode(), source=source, finished_at=finished_at)
    assert svdq("gallery", "-o", tmp_path / "all.html").returncode == 0
    page, expect = browser.new_page(), pytest.importorskip("playwright.sync_api").expect
    page.goto((tmp_path / "all.html").as_uri())
    shown = page.locator("main li:not([hidden]) h2")
    expect(shown).to_have_text(["n2", "n1", "n0"])
    page.select_option("#order", "photo")
    expect(shown).to_have_text(["trip/9.jpg", "n1", "trip/10.jpg", "n0", "n2"])
    page.fill("#search", "n1")
    expect(shown).to_have_text(["trip/9.jpg", "n1"])
    page.fill("#search", "")
    page.select_option("#order", "")
    expect(shown).to_have_text(["n2", "n1", "n0"])
    page.close()


def test_a_file_that_is_no_gallery_stays(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    add_video(storage, 1)
    page = tmp_path / "index.html"
    page.write_text("<html>mine</html>")
    done = svdq("gallery", "-o", page)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert page.read_text() == "<html>mine</html>"
    page.unlink()
    assert [svdq("gallery", "-o", page).returncode for _ in range(2)] == [0, 0]
