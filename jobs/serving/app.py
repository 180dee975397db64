"""Routes of OpenAI's Files and Batches API. Errors are JSON objects; tracebacks never leave the server."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The libraries come with an extra.

import asyncio
import errno
import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import OutputError
from runtime.units import MIB

from ..datasets.openai_body import ENCODE_ENDPOINTS, ENDPOINTS
from ..datasets.records import BadRecord, check_text, shorten
from ..record.exposition import CONTENT_TYPE, MetricFamily, format_metrics
from .answers import AnswerError, Answers
from .config import ServeConfig
from .keeper import Keeper
from .reply import Reply
from .store import FINAL, STATUSES, UPLOAD_PURPOSE, URLS, BatchStore, FileInUseError, JsonRecord, UploadLimitError

log = logging.getLogger(__name__)
FORM_BYTES = MIB // 4  # limit of a request, without the bytes of its file
RECEIVE_SECONDS = 60.0  # timeout of each piece of a request
DRAIN_SECONDS, DRAIN_PAUSE_SECONDS = 30.0, 2.0  # timeouts for the rest of a rejected body, and for each piece of it
MAX_METADATA_KEYS, MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS = 16, 64, 512  # OpenAI's limits
MAX_FILENAME_CHARACTERS = 255
MAX_BATCHES_LISTED, MAX_FILES_LISTED = 100, 10_000
DEFAULT_BATCHES_LISTED = 20
HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SINGLE_BYTES = 8 * MIB  # limit of a single request
UNSUPPORTED_PATHS = ("/v1/responses", "/v1/moderations", "/v1/images/generations", *ENCODE_ENDPOINTS)


def make_app(
    config: ServeConfig,
    store: BatchStore,
    keeper: Keeper,
    answers: Answers,
    key: str | None = None,
    models: Sequence[str] = (),
) -> Starlette:
    """Builds the application over `store`; new work wakes `keeper`. `key`: required API key. `models`: served names."""
    routes = _Routes(config, store, keeper, answers, models)
    return Starlette(
        routes=[
            Route("/v1/files", routes.add_file, methods=["POST"]),
            Route("/v1/files", routes.files),
            Route("/v1/files/{id}", routes.file),
            Route("/v1/files/{id}", routes.delete_file, methods=["DELETE"]),
            Route("/v1/files/{id}/content", routes.content),
            Route("/v1/batches", routes.add_batch, methods=["POST"]),
            Route("/v1/batches", routes.batches),
            Route("/v1/batches/{id}", routes.batch),
            Route("/v1/batches/{id}/cancel", routes.cancel, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{id:path}", routes.model),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            *(Route(path, routes.answer, methods=["POST"]) for path in ENDPOINTS),
            *(Route(path, routes.reject_single_request, methods=["GET", "POST"]) for path in UNSUPPORTED_PATHS),
        ],
        middleware=[Middleware(_Guard, config=config, key=key)],
        exception_handlers={
            HTTPException: _handle_http_error,
            ClientDisconnect: _handle_disconnect,
            TimeoutError: _handle_timeout,
            OSError: _handle_os_error,
            OutputError: _handle_os_error,
            Exception: _handle_exception,
        },
    )


def _error_response(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers=headers)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this type"
    message, headers = str(error.detail), error.headers or {}
    if "endpoint" not in request.scope:
        listed = [
            f"{method} {route.path}"
            for route in request.app.routes
            for method in sorted(route.methods - {"HEAD"})
            if route.path not in UNSUPPORTED_PATHS
        ]
        message = f"there is no route {shorten(request.scope['path'])}; routes: {', '.join(listed)}"
    elif error.status_code == 405:
        message = f"{request.scope['path']} does not allow {request.method}; allowed: {headers.get('Allow')}"
    return _error_response(error.status_code, message, headers=headers)


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    log.debug("%s %s: the client left", request.method, shorten(request.scope["path"]))
    return Response(status_code=400)  # never sent


async def _handle_timeout(request: Request, error: Exception) -> Response:
    return _error_response(408, f"no data of the request was received for {RECEIVE_SECONDS:.0f} s")


async def _handle_os_error(request: Request, error: Exception) -> Response:
    """Response to transient resource errors, such as a full disk or too few file descriptors."""
    cause = error.__cause__ if isinstance(error, OutputError) else error
    is_full = isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRNOS
    log.error("%s %s: %s", request.method, shorten(request.scope["path"]), error)
    reason = "the server's disk is full" if is_full else "the server lacks a resource, see its log"
    return _error_response(507 if is_full else 503, f"{reason}; nothing was stored", "server_error")


async def _handle_exception(request: Request, error: Exception) -> Response:
    log.error("%s %s: %s: %s", request.method, shorten(request.scope["path"]), type(error).__name__, error)
    return _error_response(500, "internal error, see the server's log", "server_error")


class _Guard:
    """Middleware that rejects browsers, missing keys and oversized requests before reading their body."""

    def __init__(self, app: ASGIApp, config: ServeConfig, key: str | None):
        self._app, self._config = app, config
        self._authorization = None if key is None else f"Bearer {key}".encode()
        # Allowed values of `Host`. Against DNS rebinding: a web page's own host name may resolve to this machine.
        self._names = {"localhost", "127.0.0.1", "[::1]", config.host, f"[{config.host}]"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        body = _RequestBody(receive, waits_for_continue=request.headers.get("expect", "").lower() == "100-continue")

        async def respond(message: Message) -> None:
            # Drain before responding: a client that is still sending would see a reset instead of the response.
            if message["type"] == "http.response.start" and not await body.drain():
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        await (self._reject(request) or self._app)(scope, body.receive, respond)

    def _reject(self, request: Request) -> Response | None:
        headers, config = request.headers, self._config
        host = HOST.fullmatch(headers.get("host", ""))
        is_named = host is not None and (not config.is_loopback or host[1].lower() in self._names)
        if "origin" in headers or headers.get("sec-fetch-site", "none") != "none" or not is_named:
            return _error_response(403, "requests from web pages are rejected")
        authorization = headers.get("authorization", "").encode()
        is_public = self._authorization is None or request.scope["path"] == "/health"
        if not is_public and not secrets.compare_digest(authorization, self._authorization or b""):
            message = "wrong api_key: the server logs the path of its key file when it starts"
            bearer = {"WWW-Authenticate": "Bearer"}
            return _error_response(401, message, "authentication_error", "invalid_api_key", bearer)
        if request.method == "POST":
            is_file = request.scope["path"] == "/v1/files"
            is_single = request.scope["path"] in ENDPOINTS
            max_bytes = SINGLE_BYTES if is_single else (config.max_file_bytes if is_file else 0) + FORM_BYTES
            length = headers.get("content-length", "")
            if not (length.isascii() and length.isdigit()):
                return _error_response(411, "a request needs a Content-Length")
            if int(length[:20]) > max_bytes:
                limit = f"max_file_mib={config.max_file_mib}" if is_file else f"{max_bytes:,} bytes"
                return _error_response(413, f"the request has {int(length[:20]):,} bytes; the limit is {limit}")
        return None


class _RequestBody:
    """Receiver of a request's body. `waits_for_continue`: the client sends the body after `100 Continue`."""

    def __init__(self, receive: Receive, *, waits_for_continue: bool):
        self._receive, self._waits_for_continue, self._is_done = receive, waits_for_continue, False

    async def receive(self, seconds: float = RECEIVE_SECONDS) -> Message:
        """Raises TimeoutError if the client sends nothing for `seconds`."""
        if self._is_done:
            return await self._receive()
        self._waits_for_continue = False
        with anyio.fail_after(seconds):
            message = await self._receive()
        self._is_done = not message.get("more_body", False)
        return message

    async def drain(self) -> bool:
        """Receives and discards the rest of the body. Returns True if the client has sent all of it."""
        with anyio.move_on_after(DRAIN_SECONDS), suppress(TimeoutError):
            while not (self._is_done or self._waits_for_continue):
                await self.receive(DRAIN_PAUSE_SECONDS)
        return self._is_done


class _Routes:
    """Route handlers. Starlette runs the synchronous ones in threads, since they may block on disk."""

    def __init__(self, config: ServeConfig, store: BatchStore, keeper: Keeper, answers: Answers, models: Sequence[str]):
        self._config, self._store, self._keeper, self._answers = config, store, keeper, answers
        self._models = models

    async def add_file(self, request: Request) -> Response:
        config = self._config
        try:
            with self._store.reserve_space(
                int(request.headers["content-length"]), config.max_files, config.max_uploads_bytes
            ):
                async with request.form(max_files=1, max_fields=10) as form:
                    upload = form.get("file")
                    if form.get("purpose") != UPLOAD_PURPOSE:
                        raise HTTPException(400, "purpose must be 'batch'")
                    if upload is None or isinstance(upload, str):
                        raise HTTPException(400, "file is missing")
                    name = (upload.filename or "requests.jsonl")[:MAX_FILENAME_CHARACTERS]
                    name = _check_text(name, "the file's name", MAX_FILENAME_CHARACTERS)
                    return _record_response(await run_in_threadpool(self._store.add_upload, upload.file, name))
        except UploadLimitError as error:
            raise HTTPException(413, str(error)) from None
        except UnicodeError:
            raise HTTPException(400, "the form does not match the charset of its Content-Type") from None

    def files(self, request: Request) -> Response:
        records, purpose = self._store.files(), request.query_params.get("purpose")
        selected = [record for record in records if purpose in (None, record["purpose"])]
        return _list_page(request, selected, MAX_FILES_LISTED, MAX_FILES_LISTED)

    def file(self, request: Request) -> Response:
        return _record_response(_require_found(self._store.file(request.path_params["id"]), "file"))

    def delete_file(self, request: Request) -> Response:
        id = request.path_params["id"]
        try:
            if not self._store.delete_file(id):
                raise HTTPException(404, "there is no such file")
        except FileInUseError as error:
            raise HTTPException(409, str(error)) from None
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    def content(self, request: Request) -> Response:
        path = Path(str(_require_found(self._store.file(request.path_params["id"]), "file")["path"]))
        if not path.is_file():
            raise HTTPException(404, "the content of this file is missing")
        return FileResponse(path, media_type="application/jsonl")

    async def add_batch(self, request: Request) -> Response:
        return await run_in_threadpool(self._create_batch, await _read_object(request))

    def _create_batch(self, body: Mapping[str, object]) -> Response:
        """Validates the whole request before anything is stored."""
        known = {"input_file_id", "endpoint", "completion_window", "metadata"}
        unknown = sorted(key for key in body.keys() - known if body[key] is not None)
        if unknown:
            raise HTTPException(400, f"{unknown[0][:60]!r} is not supported; supported: {', '.join(sorted(known))}")
        endpoint, window = body.get("endpoint"), body.get("completion_window")
        if not isinstance(endpoint, str) or endpoint not in URLS:
            raise HTTPException(400, f"endpoint must be one of {', '.join(URLS)}")
        window = "24h" if window is None else _check_text(window, "completion_window", MAX_KEY_CHARACTERS)
        metadata = _check_metadata(body.get("metadata"))
        file_id = _check_text(body.get("input_file_id"), "input_file_id", MAX_FILENAME_CHARACTERS)
        source = _require_found(self._store.file(file_id), "file")
        if source["purpose"] != UPLOAD_PURPOSE:
            raise HTTPException(400, "input_file_id: the file was not uploaded with purpose 'batch'")
        if len(self._store.unfinished_batches()) >= self._config.max_batches:
            raise HTTPException(
                429, f"max_batches={self._config.max_batches:,} unfinished batches: wait, or cancel some"
            )
        try:
            with Path(str(source["path"])).open("rb") as file:
                total = sum(1 for line in file if line.strip())
        except FileNotFoundError:
            raise HTTPException(404, "the content of this file is missing") from None
        record = _require_found(self._store.add_batch(str(source["id"]), endpoint, window, metadata, total), "file")
        self._keeper.wake()
        return _record_response(record)

    def batches(self, request: Request) -> Response:
        return _list_page(request, self._store.batches(), DEFAULT_BATCHES_LISTED, MAX_BATCHES_LISTED)

    def batch(self, request: Request) -> Response:
        return _record_response(_require_found(self._store.batch(request.path_params["id"]), "batch"))

    def cancel(self, request: Request) -> Response:
        record = _require_found(self._store.batch(request.path_params["id"]), "batch")
        if record["status"] != "cancelling":
            record = self._store.set_status(str(record["id"]), "cancelling")
        if record["status"] != "cancelling":
            raise HTTPException(409, f"the batch is already {record['status']}")
        self._keeper.wake()
        return _record_response(record)

    def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name) for name in self._models]})

    def model(self, request: Request) -> Response:
        if (name := request.path_params["id"]) not in self._models:
            raise HTTPException(404, f"the model is {', '.join(self._models)}; requests may name any")
        return JSONResponse(_model(name))

    def health(self, request: Request) -> Response:
        is_alive = self._keeper.is_alive()
        status = "ok" if is_alive else "batches are not processed: restart the server"
        return JSONResponse({"status": status}, 200 if is_alive else 503)

    def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            _format_metrics(self._store, self._answers, is_alive=self._keeper.is_alive()), media_type=CONTENT_TYPE
        )

    async def answer(self, request: Request) -> Response:
        """Answers a single request, whole or as server-sent events."""
        body, url = await _read_object(request), request.scope["path"]
        streams, options = body.get("stream", False), body.get("stream_options")
        if not isinstance(streams, bool):
            raise HTTPException(400, "stream is not true or false")
        if options is not None and not (streams and isinstance(options, dict)):
            raise HTTPException(400, "stream_options needs stream=true, and is an object")
        if streams and body.get("logprobs"):
            raise HTTPException(400, "logprobs are not supported with stream=true")
        reply = Reply(url=url, model=str(body.get("model") or ", ".join(self._models)))
        messages = self._answers.messages(url, body, streams=streams)
        if streams:
            first = await _first_message(request, messages)
            has_usage = bool((options or {}).get("include_usage"))
            return StreamingResponse(reply.events(first, messages, has_usage=has_usage), media_type="text/event-stream")
        async with aclosing(messages):
            return JSONResponse(reply.whole((await _first_message(request, messages))["response"]))

    def reject_single_request(self, request: Request) -> Response:
        path = request.url.path
        if path in ENCODE_ENDPOINTS:
            raise HTTPException(404, f"{path} is answered in batches only: POST /v1/files, then POST /v1/batches")
        raise HTTPException(404, f"{path} is not supported: send single requests to {' or '.join(ENDPOINTS)}")


async def _read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises HTTPException."""
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body is not an object")
    return body


async def _first_message(request: Request, messages: AsyncGenerator[dict[str, Any]]) -> dict[str, Any]:
    """The first message of a request in progress. Raises HTTPException if there is an error instead, and
    ClientDisconnect if the client leaves earlier; both end the request."""
    first, left = asyncio.ensure_future(anext(messages)), asyncio.ensure_future(_wait_until_left(request))
    try:
        await asyncio.wait([first, left], return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise ClientDisconnect
        return first.result()
    except AnswerError as error:
        headers = {"Retry-After": "10"} if error.status in (429, 503) else None
        raise HTTPException(error.status, str(error), headers) from None
    finally:
        left.cancel()
        if not first.done():
            first.cancel()
            with suppress(asyncio.CancelledError):
                await first


async def _wait_until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _require_found(record: JsonRecord | None, kind: str) -> JsonRecord:
    if record is None:
        raise HTTPException(404, f"there is no such {kind}")
    return record


def _check_text(value: object, name: str, max_characters: int, *, may_be_empty: bool = False) -> str:
    """Returns `value` if it is valid text of limited length. Raises HTTPException."""
    if not isinstance(value, str):
        raise HTTPException(400, f"{name} is not text")
    if len(value) > max_characters:
        raise HTTPException(400, f"{name} has {len(value):,} characters; the limit is {max_characters:,}")
    try:
        return check_text(value, name, may_be_empty)
    except BadRecord as error:
        raise HTTPException(400, str(error)) from None


def _check_metadata(value: object) -> Mapping[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_METADATA_KEYS:
        raise HTTPException(400, f"metadata must be an object of up to {MAX_METADATA_KEYS} texts")
    return {
        _check_text(key, "a key of metadata", MAX_KEY_CHARACTERS): _check_text(
            text, f"metadata {shorten(key)}", MAX_VALUE_CHARACTERS, may_be_empty=True
        )
        for key, text in value.items()
    }


def _record_response(record: JsonRecord) -> Response:
    return JSONResponse(_public_fields(record))


def _public_fields(record: JsonRecord) -> JsonRecord:
    """The record without server-internal fields."""
    return {key: value for key, value in record.items() if key not in ("path", "tokens")}


def _list_page(request: Request, records: Sequence[JsonRecord], default: int, max_limit: int) -> Response:
    """The page of `records` (oldest first) that the query parameters `limit`, `after` and `order` select."""
    query = request.query_params
    limit, order, after = query.get("limit", str(default)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= max_limit):
        raise HTTPException(400, f"limit must be 1 to {max_limit:,}")
    if order not in ("asc", "desc"):
        raise HTTPException(400, "order must be asc or desc")
    ordered = records if order == "asc" else records[::-1]
    start = 0
    if after is not None:
        start = 1 + next((i for i, record in enumerate(ordered) if record["id"] == after), -1)
        if not start:
            raise HTTPException(400, "after is not the id of a listed object")
    page = [_public_fields(record) for record in ordered[start : start + int(limit)]]
    ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, "has_more": start + len(page) < len(ordered), **ids})


def _model(name: str) -> Mapping[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "weightstream"}


def _format_metrics(store: BatchStore, answers: Answers, *, is_alive: bool) -> str:
    """Formats totals over all records, and over single requests since the start, in the Prometheus text format."""
    batches, files = store.batches(), store.files()
    rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for batch in batches:
        for total, name in ((rows, "request_counts"), (tokens, "tokens")):
            value = batch.get(name)
            counts = value if isinstance(value, dict) and batch["status"] in FINAL else {}
            total.update({key: count for key, count in counts.items() if type(count) is int})
    statuses = Counter(str(batch["status"]) for batch in batches)
    sizes: Counter[str] = Counter()
    for file in files:
        sizes[str(file["purpose"])] += int(str(file["bytes"]))
    metrics = [
        ("keeper_alive", "1 while batches are processed.", "", {"": int(is_alive)}),
        ("batches", "Batches by status.", "status", {name: statuses[name] for name in sorted(STATUSES)}),
        ("rows", "Rows of ended batches.", "result", {name: rows[name] for name in ("completed", "failed")}),
        (
            "tokens",
            "Tokens of answered rows.",
            "kind",
            {kind: tokens[f"{kind}_tokens"] for kind in ("prompt", "completion")},
        ),
        ("files", "Stored files.", "purpose", Counter(str(file["purpose"]) for file in files)),
        ("file_bytes", "Bytes of these files.", "purpose", sizes),
        (
            "requests",
            "Single requests by result.",
            "result",
            {name: answers.counts[name] for name in ("answered", "cancelled", "failed", "rejected")},
        ),
        ("requests_in_progress", "Single requests that wait or run.", "", {"": answers.num_waiting}),
        ("pass_rows", "Completions in the latest pass.", "", {"": answers.num_pass_rows}),
        ("passes", "Passes for single requests.", "", {"": answers.counts["passes"]}),
        ("rows_of_passes", "Completions in all of these passes.", "", {"": answers.counts["pass_rows"]}),
        ("new_tokens", "Tokens generated for single requests.", "", {"": answers.counts["tokens"]}),
    ]
    return format_metrics(
        MetricFamily(
            name=f"weightstream_{name}",
            help=text,
            samples=[({label: value} if label else {}, number) for value, number in values.items()],
        )
        for name, text, label, values in metrics
    )
