"""Who is let in: token, cookie, host and origin; and the headers of every response."""

import pytest

from svdq.cli.serve.page import STATIC
from tests.cli.serve.servers import TOKEN, TYPE, TYPED, Serve, Server, multipart

pytestmark = pytest.mark.slow


def test_without_the_token(server: Server) -> None:
    wrong = [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer \xe9"},
        {"Cookie": f"svdq_{server.port}={TOKEN}"},
    ]
    for headers in wrong:
        for method, path in [("GET", "/v1/videos"), ("POST", "/v1/videos"), ("GET", "/v1/models"), ("GET", "/")]:
            answer = server.ask(method, path, headers=headers)
            assert answer.status == 401
            assert answer.error["type"] == "authentication_error"
            assert answer.headers["WWW-Authenticate"]
    assert server.ask("GET", "/health", headers={}).status == 200
    assert server.ask("GET", "/health/live", headers={}).json == {"status": "ok"}
    assert server.ask("GET", f"{STATIC}/style.css", headers={}).status == 200


def test_the_link_sets_a_cookie(server: Server) -> None:
    first = server.ask("GET", "/", headers={"Accept": "text/html"})
    assert (first.status, first.headers["Location"]) == (303, "/login")
    assert server.ask("GET", "/login", headers={}).status == 200
    assert server.ask("GET", "/login?token=wrong", headers={}).status == 401

    answer = server.ask("GET", f"/login?token={TOKEN}", headers=TYPED)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert TOKEN not in cookie
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    given = cookie.partition(";")[0]
    assert server.ask("GET", "/", headers={"Cookie": given}).status == 200
    assert server.ask("GET", "/v1/videos", headers={"Cookie": given}).status == 200
    beside_a_proxy = {"Cookie": given, "Authorization": "Basic YTpi"}
    assert server.ask("GET", "/v1/videos", headers=beside_a_proxy).status == 200
    assert server.ask("GET", "/v1/videos", headers={"Cookie": given, "Authorization": "Bearer wrong"}).status == 401
    secure = server.ask("GET", f"/login?token={TOKEN}", headers={**TYPED, "X-Forwarded-Proto": "https"})
    assert "Secure" in secure.headers["Set-Cookie"].split("; ")
    form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": server.url}
    assert server.ask("POST", "/login", f"token={TOKEN}", form).headers["Set-Cookie"]
    wrong = server.ask("POST", "/login", "token=wrong", form)
    assert (wrong.status, "Set-Cookie" in wrong.headers) == (401, False)
    # The cookie is no token.
    value = given.partition("=")[2]
    assert server.ask("GET", "/v1/videos", headers={"Authorization": f"Bearer {value}"}).status == 401


def test_other_hosts_are_refused(server: Server) -> None:
    for host in (
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "192.0.2.1",
        "",
        "[::1",
        "a@evil.example",
        "127.0.0.1@127.0.0.1",
        "127.0.0.1/static/x?",  # a path in it is no path of the request
        "127.0.0.1#",
        "127.0.0.1:80:80",
    ):
        answer = server.get("/v1/videos", Host=host)
        assert (answer.status, answer.error["code"]) == (400, "unknown_host"), host
        assert server.get("/health", Host=host).status == 400


def test_hosts_of_this_machine_and_named_ones(serve: Serve) -> None:
    server = serve("--port", "0", "--allow-host", "Videos.example")
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80", "videos.example", "videos.example:443"):
        assert server.get("/v1/videos", Host=host).status == 200, host


#: What browsers send with requests of other sites' pages.
FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


def test_a_link_from_elsewhere_logs_nobody_in_unasked(server: Server) -> None:
    for headers in ({}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
        answer = server.ask("GET", f"/login?token={TOKEN}", headers=headers)
        assert (answer.status, answer.headers["Set-Cookie"]) == (200, None)
        assert b"Log in as the owner of this server?" in answer.body
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    own, other = {**form, "Origin": server.url}, {**form, "Origin": "http://attacker.example"}
    assert server.ask("POST", "/login", f"token={TOKEN}", own).headers["Set-Cookie"]
    assert server.ask("POST", "/login", f"token={TOKEN}", other).status == 403


def test_a_browser_that_logs_out_forgets_the_cookie(server: Server) -> None:
    cookie = server.ask("GET", f"/login?token={TOKEN}", headers=TYPED).headers["Set-Cookie"].partition(";")[0]
    answer = server.ask("POST", "/logout", headers={"Cookie": cookie, "Origin": server.url})
    assert (answer.status, answer.headers["Location"]) == (303, "/login")
    name, _, rest = answer.headers["Set-Cookie"].partition("=")
    assert (name, rest.startswith('""; '), "Max-Age=0" in rest) == (cookie.partition("=")[0], True, True)
    assert server.ask("POST", "/logout", headers={"Cookie": cookie, "Origin": "http://attacker.example"}).status == 403


def test_writes_from_other_pages_are_refused(server: Server, photo_bytes: bytes) -> None:
    cookie = server.ask("GET", f"/login?token={TOKEN}", headers=TYPED).headers["Set-Cookie"].partition(";")[0]
    for headers in FOREIGN:
        sent = {"Cookie": cookie, "Content-Type": TYPE, **headers}
        for method, path in [("POST", "/v1/videos"), ("DELETE", "/v1/videos/x"), ("POST", "/login")]:
            answer = server.ask(method, path, multipart(photo_bytes), sent)
            assert (answer.status, answer.error["code"]) == (403, "cross_origin"), headers
    assert server.get("/v1/videos").json["data"] == []
    own = {"Cookie": cookie, "Content-Type": TYPE, "Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert server.ask("POST", "/v1/videos", multipart(photo_bytes), own).status == 200
    # A page cannot make a browser send the token.
    for headers in FOREIGN:
        sent = {**server.bearer, "Content-Type": TYPE, **headers}
        assert server.ask("POST", "/v1/videos", multipart(photo_bytes), sent).status == 200


def test_headers_of_every_response(server: Server) -> None:
    for path in ("/", "/login", "/v1/videos", "/v1/nothing", f"{STATIC}/style.css", "/health"):
        headers = server.get(path).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Server"] is None
        assert len(headers["X-Request-Id"]) == 32
