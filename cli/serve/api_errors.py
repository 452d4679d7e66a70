"""Errors as the API answers them: `{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError

logger = logging.getLogger(__name__)

RETRY = {"Retry-After": "2"}  # headers of errors after which a client may try again: seconds
request_id: ContextVar[str] = ContextVar("request_id", default="")  # id of the request that is being answered


class Json(JSONResponse):
    """JSON in ASCII, which can carry any text that JSON can: a record may have half a character."""

    def render(self, content: Any) -> bytes:
        """Encode a value."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class ApiError(Exception):
    """Why a request is not answered, as one sentence; `param` is the wrong field, and 400 and 404 have a `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or {400: "invalid_value", 404: "not_found"}.get(status)
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """Return the response."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        if self.status == HTTPStatus.UNAUTHORIZED:
            kind = "authentication_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        # The middleware that adds the id to other responses does not see those to unexpected errors.
        return Json({"error": error}, self.status, self.headers | {"X-Request-Id": request_id.get()})


class RedisAwayError(ApiError):
    """Redis does not answer."""

    def __init__(self) -> None:
        message = "The queue cannot be reached: Redis does not answer. Try again in a few seconds."
        super().__init__(503, message, code="redis_unavailable", headers=RETRY)


_FOLDERS = re.compile(
    r"""(?P<quote>['"])/(?:(?:(?!(?P=quote)).)*/)?(?=[^/])   # in quotes, up to the last name
      | (?<![\w:/.<~'"])/(?:[^\s/'",;()]+/)*(?=[^\s/])        # without
    """,
    re.VERBOSE,
)


def without_folders(text: str) -> str:
    """Return a sentence with only the last names of its absolute paths."""
    return _FOLDERS.sub(lambda found: found["quote"] or "", text)


def no_token() -> ApiError:
    """Create the error for a request without a valid token."""
    message = "The token is missing or wrong; send the server's token as `Authorization: Bearer TOKEN`."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": 'Bearer realm="svdq"'})


def add_request_id(record: logging.LogRecord) -> bool:
    """Name the request in a line of the log: a filter of `logging`."""
    if found := request_id.get():
        record.msg = f"{record.msg} (request {found})"
    return True


def no_such_video(video_id: str) -> ApiError:
    """Create the error for a video that does not exist."""
    return ApiError(404, f"There is no video {video_id[:80]!r}.", param="video_id")


def _methods(request: Request) -> set[str]:
    """Return the methods of all routes at the path of a request."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    at_path = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return {method for route in at_path for method in route.methods or ()}


#: Exceptions of views. All have one handler, but Starlette logs a traceback of those that are `Exception` only.
ANSWERED: tuple[type[Exception], ...] = (ApiError, SvdqError, HTTPException, ClientDisconnect, OSError, Exception)


def answer_error(request: Request, error: Exception) -> Response:
    """Answer any exception of a view; foreign ones are logged."""
    return as_api_error(request, error).response()


def as_api_error(request: Request, error: Exception) -> ApiError:
    """Return the error that any exception of a view is answered with; foreign ones are logged."""
    if isinstance(error, ClientDisconnect):
        error = ApiError(400, "The client has gone.", code="bad_request")  # nobody reads it
    elif isinstance(error, HTTPException):
        place = repr(request.url.path[:200])
        message, code = {
            404: (f"There is nothing at {place}.", "not_found"),
            405: (f"{request.method} is not allowed at {place}.", "method_not_allowed"),
        }.get(error.status_code, (str(error.detail), "bad_request"))
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:  # Starlette names the methods of the first route
            headers["Allow"] = ", ".join(sorted(_methods(request)))
        error = ApiError(error.status_code, message, code=code, headers=headers)
    elif isinstance(error, InputError):
        error = ApiError(400, without_folders(str(error)))
    elif isinstance(error, UnavailableError | OSError):  # such as a full disk for what is being uploaded
        logger.warning("%s", error)
        message = "The storage cannot be used. Try again later; the log of `svdq serve` has the reason."
        error = ApiError(503, message, code="storage_unavailable", headers=RETRY)
    elif not isinstance(error, ApiError):
        logger.error("%s %s failed:", request.method, request.url.path)  # uvicorn logs the traceback
        error = ApiError(500, "The server has failed; the log of `svdq serve` has the reason.", code="internal_error")
    return error
