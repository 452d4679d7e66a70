import os
import pwd
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.toml_file import MAX_BYTES
from svdq.producer.settings import Settings, given_path, without_secrets
from svdq.producer.settings_loader import change_file, load_settings


@pytest.mark.usefixtures("own_server")
def test_defaults(home: Path) -> None:
    settings = load_settings()
    assert settings.home == home
    assert settings.storage == str(home / "storage")
    assert settings.redis_url is None
    assert settings.model == "preview"


def test_the_folder_of_a_model_is_relative_to_the_file(home: Path) -> None:
    (home / "models" / "svd").mkdir(parents=True)
    (home / "preview").mkdir()
    for name in ("preview", "org/model", "/models/svd", "~/models/svd"):
        (home / "svdq.toml").write_text(f'model = "{name}"')
        assert load_settings().model == os.path.expanduser(name)
    (home / "svdq.toml").write_text('model = "models/svd"')
    assert load_settings().model == str(home / "models/svd")
    assert load_settings(model="models/svd").model == "models/svd"
    Path("models/svd").mkdir(parents=True)
    Path("svdq.toml").write_text('model = "models/svd"')
    assert load_settings().model == "models/svd"


def test_order_of_sources(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    (home / "svdq.toml").write_text('model = "home"\nstorage = "videos"\nmax_pixels = 5')
    assert load_settings().model == "home"
    assert load_settings().storage == str(home / "videos"), "relative to the file"
    Path("svdq.toml").write_text('model = "here"')
    assert load_settings().model == "here"
    monkeypatch.setenv("SVDQ_MODEL", "env")
    assert load_settings(model=None).model == "env"
    assert load_settings(model="flag").model == "flag"
    assert load_settings().max_pixels == 5


@pytest.mark.parametrize("url", ["file://", "local://"])
def test_a_url_of_no_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with pytest.raises(InputError, match="names no folder"):
        load_settings(storage=url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "svdq.toml").write_text(f'storage = "{url}"')
    with pytest.raises(InputError, match="names no folder"):
        load_settings()


@pytest.mark.parametrize("url", ["s3:/bucket/prefix", "gs:bucket", "file:/srv/videos"])
def test_a_url_without_its_slashes_is_no_folder(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SVDQ_STORAGE", url)
    with pytest.raises(InputError, match="lacks its two slashes"):
        load_settings()


@pytest.mark.parametrize("url", ["videos", "file://videos", "local://videos"])
def test_a_relative_folder_is_the_same_for_every_process(home: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SVDQ_STORAGE", url)
    assert load_settings().storage == str(Path("videos").absolute())
    monkeypatch.delenv("SVDQ_STORAGE")
    home.mkdir()
    (home / "svdq.toml").write_text(f'storage = "{url}"')
    assert load_settings().storage == str(home / "videos"), "relative to the file"


def test_home_of_a_file_decides_the_next_file(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SVDQ_HOME")
    other = tmp_path / "other"
    other.mkdir()
    (other / "svdq.toml").write_text("max_pixels = 7")
    Path("svdq.toml").write_text('home = "../other"')
    assert load_settings().max_pixels == 7


@pytest.mark.parametrize("name", ["home", "storage"])
def test_an_impossible_folder_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(InputError, match="'~nobody-here/x' begins with ~nobody-here"):
        load_settings(**{name: "~nobody-here/x"})
    monkeypatch.delenv("SVDQ_HOME")
    Path("svdq.toml").write_text(f'{name} = "a\\u0000b"')
    with pytest.raises(InputError, match="null byte"):
        load_settings()
    Path("svdq.toml").write_text(f'{name} = "~nobody-here/x"')
    with pytest.raises(InputError, match="'~nobody-here/x' begins with ~nobody-here"):
        load_settings()


@pytest.mark.parametrize(("name", "value"), [("MAX_PIXELS", "many"), ("MAX_PIXELS", "0")])
def test_bad_value(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"SVDQ_{name}", value)
    with pytest.raises(InputError, match=f"SVDQ_{name}.*'{value}'"):
        load_settings()


@pytest.mark.parametrize("text", ["modle = 'x'", "not toml", "home = ''", "storage = ''"])
def test_bad_file(home: Path, text: str) -> None:
    Path("svdq.toml").write_text(text)
    with pytest.raises(InputError):
        load_settings()


@pytest.mark.parametrize("text", ["a = " + "[" * 2000 + "]" * 2000, "#" * (MAX_BYTES + 1)], ids=["nested", "large"])
@pytest.mark.parametrize("folder", [".", "home"])
def test_a_file_that_nobody_writes(home: Path, text: str, folder: str) -> None:
    place = home if folder == "home" else Path()
    place.mkdir(exist_ok=True)
    (place / "svdq.toml").write_text(text)
    with pytest.raises(InputError, match=r"svdq\.toml' cannot be read \(it is (nested too deeply|larger)"):
        load_settings()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"max_pixels": "abc"}, "is 'abc': it must be a valid integer; correct or unset it"),
        ({"owner": "a/b"}, "is 'a/b': it must be 1 to 64 characters"),
    ],
)
def test_what_a_setting_must_be_is_said(home: Path, given: dict[str, str], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_settings(**given)


@pytest.mark.parametrize(
    ("user", "owner"),
    [
        ("ana", "ana"),
        ("CORP\\ana", "CORP_ana"),
        (".ana", "_ana"),
        ("a" * 80, "a" * 64),
        (None, f"uid{os.getuid()}"),
    ],
)
def test_every_user_is_an_owner_whom_ranks_can_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, user: str | None, owner: str
) -> None:
    """In a container with --user, a user may have neither a name nor a home."""

    def nobody(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    if user is not None:
        monkeypatch.setenv("LOGNAME", user)
    settings = load_settings()
    assert (settings.owner, settings.home) == (owner, home)
    assert Settings.model_validate_json(settings.model_dump_json()).owner == owner
    monkeypatch.delenv("SVDQ_HOME")
    with pytest.raises(InputError, match="set SVDQ_HOME"):
        load_settings()


def test_parameters_of_videos_are_no_settings_of_the_home(home: Path) -> None:
    Path("svdq.toml").write_text("frames = 25")  # the working folder may be watched, too
    load_settings()
    home.mkdir(exist_ok=True)
    (home / "svdq.toml").write_text("motion-bucket-id = 25")
    with pytest.raises(InputError, match=r"'motion-bucket-id' in svdq\.toml of SVDQ_HOME is a parameter of videos"):
        load_settings()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_path_that_is_no_file(home: Path, make: Callable[[str], None]) -> None:
    make("svdq.toml")
    with pytest.raises(InputError, match="cannot be read"):
        load_settings()


def test_repr_has_no_password(home: Path) -> None:
    assert "secret" not in repr(load_settings(redis_url="redis://:secret@h", storage="ftp://u:secret@h/x"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:secret@h:1/0", "redis://h:1"),
        ("redis://:secret@h", "redis://h"),
        ("redis://h?password=secret", "redis://h"),
        ("redis://:sec@ret@[::1", "***"),
        ("redis://user:s3cret@host:1/0?password=s3cret", "redis://host:1"),
        # Passwords with what would end them in a URL.
        ("redis://:s3cret/b@host:1/0", "***"),
        ("redis://:a?s3cret@host:1/0", "***"),
        ("redis://:a#s3cret@host:1/0", "***"),
        ("redis://user:a@s3cret/c@host:1/0?x=y", "***"),
        # Not well-formed, so that the password is somewhere else.
        ("unix://:s3cret/var/run/redis.sock", "***"),
        ("unix:///var/run/redis.sock?password=s3cret", "unix:///var/run/redis.sock"),
        ("redis://s3cret@127.0.0.1:6391/0", "redis://127.0.0.1:6391"),
        ("redis://s3/cret@host", "***"),
        ("redis://host:s3cret/0", "***"),
        ("redis:s3cret@host:1", "***"),
        ("s3cret@host:1", "***@host:1"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379"),
        ("redis://user:1?s3cret@host:1/0", "***"),
        ("redis://host:70000", "***"),
        ("redis://h:1/0;password=s3cret", "***"),
        ("redis://h/password=s3cret", "***"),
        ("redis:///:s3cret@h", "***"),
        ("redis://h/0#s3cret", "***"),
        ("REDIS://h:1,password=s3cret", "***"),
        ("unix:/x;password=s3cret", "***"),
        ("unix:///x;password=s3cret", "***"),
        ("unix://u:s3cret@/var/run/redis.sock", "unix:///var/run/redis.sock"),
        ("s3://bucket/x;aws_secret_access_key=s3cret/y", "s3://bucket/x;aws_secret_access_key=***"),
        ("AccountName=a;AccountKey=s3cret", "AccountName=a;AccountKey=***"),
        ("s3://bucket/photos@home", "s3://bucket/photos@home"),
        ("s3://bucket/photos#1", "s3://bucket/photos#1"),
        ("/a/folder@home", "/a/folder@home"),
        ("/a/path", "/a/path"),
    ],
)
def test_without_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("webhook_url", "ftp://example.com/s3cret"),
        ("webhook_url", "https:///s3cret"),
        ("webhook_url", "https://user:s3cret@example.com/"),
        ("webhook_url", "https://example.com:0/s3cret"),
        ("webhook_url", "https://example.com/s3cret\r\nx: y"),
        ("webhook_secret", "s3cret"),
        ("webhook_secret", "whsec_s3cret"),
        ("webhook_secret", f"whsec_{'s3cret==' * 5}"),
    ],
)
def test_a_wrong_webhook_is_a_sentence_without_the_secret(home: Path, name: str, value: str) -> None:
    with pytest.raises(InputError, match=f"The setting SVDQ_{name.upper()} .* it must be ") as caught:
        load_settings(**{name: value})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("notify", [(), ("json://one", "json://two")])
def test_a_child_has_the_same_settings(monkeypatch: pytest.MonkeyPatch, home: Path, notify: tuple[str, ...]) -> None:
    settings = load_settings(model="preview", notify=notify or None)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


def test_one_reader_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "~old").mkdir()
    assert given_path("~/a b.jpg") == tmp_path / "me/a b.jpg"
    assert given_path("~/a.jpg", tmp_path) == tmp_path / "me/a.jpg"
    assert given_path("~old/a.jpg", tmp_path) == tmp_path / "~old/a.jpg"
    assert given_path("./~older/a.jpg", tmp_path) == tmp_path / "~older/a.jpg"
    with pytest.raises(InputError, match="no user's home"):
        given_path("~older/a.jpg", tmp_path)


def test_a_changed_file_keeps_all_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "home" / "svdq.toml"
    assert change_file(path, {"model": 'a "b" \\ \x7f é', "output": None}) == {"model": None}
    path.chmod(0o600)
    assert tomllib.loads(path.read_text()) == {"model": 'a "b" \\ \x7f é'}
    path.write_text("# mine\nmodel='a' # why\n\nnotify = [\n  'ntfy://a',\n]\nstorage = 'b'\n")
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    assert change_file(link, {"model": "c", "storage": None, "output": "d"}) == {
        "model": "a",
        "storage": "b",
        "output": None,
    }
    assert path.read_text() == '# mine\nmodel = "c"\n\nnotify = [\n  \'ntfy://a\',\n]\noutput = "d"\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert link.is_symlink()
    before = path.stat()
    assert change_file(path, {"model": "c"}) == {}
    assert path.stat() == before


@pytest.mark.parametrize("text", ["model = '''a\nb'''\n", "'model' = 'a'\n", "[model]\nmodel = 'a'\n", "model = 'a\n"])
def test_a_file_that_cannot_be_changed_line_by_line_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "svdq.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"svdq\.toml' cannot be"):
        change_file(path, {"model": "b"})
    assert path.read_text() == text
