"""`svdq gallery`: a page that opens from disk, whatever videos are called, in a real browser where there is one."""

import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pillow_heif
import pytest
import redis
from PIL import Image
from rq.job import JobStatus
from rq.results import Result

from svdq.producer.job import SvdJob
from svdq.producer.queue import SvdqQueue
from svdq.producer.results.finished_videos import find_results
from svdq.producer.results.gallery import write_gallery
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from tests.finished import NOTICE, add_video
from tests.queued import enqueue

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
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


def fail(connection: redis.Redis, number: int, reason: str, name: str = "photo", image: str = "") -> None:
    job = SvdJob(image=image or f"inputs/{'0' * 64}.jpg", name=name, seed=1, steps=4)
    rq_job = enqueue(connection, job, f"{number:020x}")
    queue = SvdqQueue(rq_job.origin, connection=connection)
    queue.remove(rq_job)
    Result.create_failure(rq_job, ttl=100, exc_string=reason)
    queue.failed_job_registry.add(rq_job, ttl=100)
    rq_job.set_status(JobStatus.FAILED)


@pytest.fixture
def storage(settings: Settings) -> Storage:
    return Storage(settings.storage)


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
    fail(connection, 9, 'x.SampleError: <b>black</b> & "blue"', name=names["mp4"])

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


@pytest.mark.parametrize(
    "arguments",
    [["-o", "video.mp4"], ["-o", "nowhere/all.html"], ["--since", "soon"], ["nowhere"], ["--limit", "0"]],
    ids=" ".join,
)
def test_bad_input_is_one_sentence(svdq: Cli, home: Path, arguments: list[str]) -> None:
    done = svdq("gallery", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert list(Path().iterdir()) == []
    assert not home.exists()


# In a browser.


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[Path, str], str]:
    """Open a page from disk, do something in it, and give what it is then."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here")

    def run(page: Path, script: str) -> str:
        # A page of the test's around it acts in it as a user would; what it finds becomes its title.
        outer = page.with_name("outer.html")
        outer.write_text(
            f'<!doctype html><title>?</title><iframe src="{page.name}" width=1200 height=800></iframe><script>\n'
            "const frame = document.querySelector('iframe');\n"
            "frame.addEventListener('load', async function () {\n"
            "  const doc = frame.contentDocument, win = frame.contentWindow;\n"
            "  const until = async function (wanted) {\n"
            "    for (let i = 0; i < 400 && !wanted(); i++) await new Promise(go => setTimeout(go, 50));\n"
            "    return wanted();\n"
            "  };\n"
            f"  document.title = JSON.stringify(await (async function () {{ {script} }})());\n"
            "});\n</script>"
        )
        playwright = pytest.importorskip("playwright.sync_api")
        # In real time: with virtual time, a busy machine does not load a video before the time is up.
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--allow-file-access-from-files"]
            )
            opened = browser.new_page()
            opened.goto(outer.as_uri())
            opened.wait_for_function("document.title !== '?'", timeout=100_000)
            title = opened.title()
            browser.close()
        return json.loads(title)

    return run


@pytest.mark.slow
def test_in_a_browser(
    svdq: Cli, connection: redis.Redis, storage: Storage, tmp_path: Path, browse: Callable[[Path, str], dict]
) -> None:
    for number in range(2, 60):
        add_video(storage, number, name=f"cat {number}" if number % 2 else f"dog {number}", formats=("gif",))
    add_video(storage, 1, name=NASTY.replace("/", "_"))
    fail(connection, 99, "x.SampleError: The frames are black.", name="cat 99")
    add_video(storage, 100, name="far away", finished_at=datetime.now(UTC) - timedelta(days=9))
    page = tmp_path / "all.html"
    assert svdq("gallery", "-o", page).returncode == 0
    found = browse(
        page,
        """
        const cards = Array.from(doc.querySelectorAll(".card"));
        const shown = () => cards.filter(card => !card.hidden).length;
        const type = function (id, value) {
          doc.getElementById(id).value = value;
          doc.getElementById(id).dispatchEvent(new win.Event(id === "search" ? "input" : "change"));
        };
        const videos = Array.from(doc.querySelectorAll("video"));
        const far = videos.find(video => video.dataset.src.includes("far"));
        const near = videos.find(video => video !== far);
        near.closest(".card").scrollIntoView();
        const answer = {all: shown()};
        answer.first_frame = await until(() => near.readyState >= 2 && near.videoWidth === 64);
        answer.far_is_not_loaded = !far.hasAttribute("src");
        near.closest(".frame").focus();
        answer.plays_on_focus = await until(() => !near.paused);
        doc.activeElement.blur();
        answer.stops_on_blur = await until(() => near.paused);
        const frame = doc.querySelector("img[data-src]").closest(".frame");
        const image = frame.querySelector("img");
        frame.dispatchEvent(new win.MouseEvent("mouseenter"));
        answer.moves_on_hover = image.src.endsWith(".gif");
        frame.dispatchEvent(new win.MouseEvent("mouseleave"));
        answer.is_still_again = image.src.startsWith("data:image/jpeg");
        type("search", "cAt");
        answer.cats = shown();
        answer.count = doc.getElementById("count").value;
        type("state", "failed");
        type("search", "");
        answer.failed = shown();
        return answer;
        """,
    )
    assert found == {
        "all": 61,
        "first_frame": True,
        "far_is_not_loaded": True,
        "plays_on_focus": True,
        "stops_on_blur": True,
        "moves_on_hover": True,
        "is_still_again": True,
        "cats": 30,
        "count": "30 of 61 shown",
        "failed": 1,
    }


@pytest.mark.slow
def test_in_a_browser_videos_are_grouped_by_photo(
    svdq: Cli, storage: Storage, tmp_path: Path, browse: Callable[[Path, str], dict]
) -> None:
    now = datetime.now(UTC)
    for number, (photo, source) in enumerate([("b", "trip/10.jpg"), ("a", "trip/9.jpg"), ("b", "trip/10.jpg")]):
        finished_at = now - timedelta(hours=9 - number)
        add_video(storage, number, name=f"n{number}", photo=photo.encode(), source=source, finished_at=finished_at)
    page = tmp_path / "all.html"
    assert svdq("gallery", "-o", page).returncode == 0
    found = browse(
        page,
        """
        const shown = () => Array.from(doc.querySelectorAll("main li")).filter(item => !item.hidden)
          .map(item => item.querySelector("h2").textContent);
        const change = function (id, value, event) {
          doc.getElementById(id).value = value;
          doc.getElementById(id).dispatchEvent(new win.Event(event));
        };
        const answer = {newest: shown()};
        change("order", "photo", "change");
        answer.photos = shown();
        change("search", "n1", "input");
        answer.found = shown();
        change("search", "", "input");
        change("order", "", "change");
        answer.again = shown();
        return answer;
        """,
    )
    newest = ["n2", "n1", "n0"]
    assert found == {
        "newest": newest,
        "photos": ["trip/9.jpg", "n1", "trip/10.jpg", "n0", "n2"],
        "found": ["trip/9.jpg", "n1"],
        "again": newest,
    }
