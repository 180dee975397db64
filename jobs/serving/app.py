"""The routes, as OpenAI's clients ask them; every refusal is an error object, and nothing else leaves the server."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The libraries are an extra.

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from runtime.units import MIB

from ..datasets.openai_body import ENDPOINTS
from ..datasets.openai_inputs import ENCODED
from .config import ServeConfig
from .keeper import Keeper
from .store import FINAL, BatchStore, Record, new_id

log = logging.getLogger(__name__)
FORM_BYTES = MIB // 4  # beside a file's own bytes, and of a request without one
CHUNK_BYTES = MIB


def make_app(config: ServeConfig, store: BatchStore, keeper: Keeper) -> Starlette:
    """An application over `store`, which tells `keeper` of new work."""
    routes = _Routes(config, store, keeper)
    return Starlette(
        routes=[
            Route("/v1/files", routes.add_file, methods=["POST"]),
            Route("/v1/files", routes.files),
            Route("/v1/files/{id}", routes.file),
            Route("/v1/files/{id}/content", routes.content),
            Route("/v1/batches", routes.add_batch, methods=["POST"]),
            Route("/v1/batches", routes.batches),
            Route("/v1/batches/{id}", routes.batch),
            Route("/v1/batches/{id}/cancel", routes.cancel, methods=["POST"]),
        ],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_Guard(config)),
        ],
        exception_handlers={HTTPException: _refusal, Exception: _mistake},
    )


def _error(status: int, message: str, kind: str = "invalid_request_error") -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    return _error(error.status_code, str(error.detail))


async def _mistake(request: Request, error: Exception) -> Response:
    log.error("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error)
    return _error(500, "the server made a mistake; its log says which", "server_error")


class _Guard:
    """Refuses what is too long before it is read, and what a page in a browser sends."""

    def __init__(self, config: ServeConfig):
        self._max_file_mib = config.max_file_mib
        # What a client on this machine calls it: a page that makes its own name lead here is refused.
        self._names = {"localhost", "127.0.0.1", "::1", config.host} if config.is_loopback else None

    async def __call__(self, request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        is_named = self._names is None or request.url.hostname in self._names
        if "origin" in request.headers or not is_named:
            return _error(403, "requests of web pages are not answered")
        if request.method == "POST":
            is_file = request.url.path == "/v1/files"
            most = (self._max_file_mib * MIB if is_file else 0) + FORM_BYTES
            length = request.headers.get("content-length", "")
            if not (length.isascii() and length.isdigit()):
                return _error(411, "a request needs a Content-Length")
            if int(length[:20]) > most:
                limit = f"max_file_mib={self._max_file_mib}" if is_file else f"{FORM_BYTES:,} bytes"
                return _error(413, f"the request has {int(length[:20]):,} bytes, {limit} is the most")
        return await answer(request)


class _Routes:
    def __init__(self, config: ServeConfig, store: BatchStore, keeper: Keeper):
        self._config, self._store, self._keeper = config, store, keeper

    async def add_file(self, request: Request) -> Response:
        async with request.form(max_files=1, max_fields=10) as form:
            upload, purpose = form.get("file"), form.get("purpose")
            if purpose != "batch":
                raise HTTPException(400, "purpose must be 'batch'")
            if upload is None or isinstance(upload, str):
                raise HTTPException(400, "there is no file")
            id = new_id("file-")
            path = self._store.content(id)
            with path.open("xb") as file:
                while chunk := await upload.read(CHUNK_BYTES):
                    await run_in_threadpool(file.write, chunk)
            record = self._store.add_file(id, path, (upload.filename or "requests.jsonl")[:255], "batch")
        return JSONResponse(_shown(record))

    async def files(self, request: Request) -> Response:
        return _listed(self._store.files())

    async def file(self, request: Request) -> Response:
        return JSONResponse(_shown(self._file(request.path_params["id"])))

    async def content(self, request: Request) -> Response:
        path = Path(str(self._file(request.path_params["id"])["path"]))
        if not path.is_file():
            raise HTTPException(404, "the content of this file is gone")
        return FileResponse(path, media_type="application/jsonl")

    async def add_batch(self, request: Request) -> Response:
        asked = await _object(request)
        known = {"input_file_id", "endpoint", "completion_window", "metadata"}
        unknown = sorted(key for key in asked.keys() - known if asked[key] is not None)
        if unknown:
            raise HTTPException(400, f"{unknown[0][:60]!r} cannot be honoured: {', '.join(sorted(known))} can")
        endpoints = [*ENDPOINTS, *ENCODED]
        if asked.get("endpoint") not in endpoints:
            raise HTTPException(400, f"endpoint must be one of {', '.join(endpoints)}")
        source = self._file(str(asked.get("input_file_id")))
        metadata, window = asked.get("metadata"), str(asked.get("completion_window") or "24h")
        if source["purpose"] != "batch":
            raise HTTPException(400, "input_file_id names a file that was not uploaded for a batch")
        if metadata is not None and not _is_metadata(metadata):
            raise HTTPException(400, "metadata must be an object of texts")
        total = await run_in_threadpool(_num_lines, Path(str(source["path"])))
        record = self._store.add_batch(str(source["id"]), str(asked["endpoint"]), window, metadata, total)  # pyright: ignore[reportArgumentType]
        self._keeper.wake()
        return JSONResponse(_shown(record))

    async def batches(self, request: Request) -> Response:
        return _listed(self._store.batches()[::-1])

    async def batch(self, request: Request) -> Response:
        return JSONResponse(_shown(self._batch(request.path_params["id"])))

    async def cancel(self, request: Request) -> Response:
        id = str(self._batch(request.path_params["id"])["id"])
        record = self._store.change(id, lambda now: {} if now["status"] in FINAL else {"status": "cancelling"})
        if record["status"] != "cancelling":
            raise HTTPException(409, f"the batch is {record['status']} already")
        self._keeper.wake()
        return JSONResponse(_shown(record))

    def _file(self, id: str) -> Record:
        found = self._store.file(id)
        if found is None:
            raise HTTPException(404, "there is no such file")
        return found

    def _batch(self, id: str) -> Record:
        found = self._store.batch(id)
        if found is None:
            raise HTTPException(404, "there is no such batch")
        return found


async def _object(request: Request) -> Mapping[str, object]:
    try:
        value = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(value, dict):
        raise HTTPException(400, "the body is not an object")
    return value


def _is_metadata(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _shown(record: Record) -> Record:
    """A record without what is the server's own."""
    return {key: value for key, value in record.items() if key != "path"}


def _listed(records: Iterable[Record]) -> Response:
    shown = [_shown(record) for record in records]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": shown, "has_more": False, **ends})
