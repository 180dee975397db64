"""A real server of S3's protocol on a free port, whose answers can be made to fail."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "an-access-key", "AWS_SECRET_ACCESS_KEY": "a-secret-key"}
Refuses = Callable[[str, str], bool]


def refuses_nothing(method: str, path: str) -> bool:
    return False


class S3Server:
    """A server that keeps what is stored when it goes. Which requests are `refused` with 403, and at which of them it
    `goes`, is said by method and path. `gets`: what was read."""

    def __init__(self) -> None:
        from moto.backends import get_backend
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        get_backend("s3").reset()
        self._app = DomainDispatcherApplication(create_backend_app)
        self.port = 0
        self.gets: list[str] = []
        self.refused: Refuses = refuses_nothing
        self.goes: Refuses = refuses_nothing

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process finds the server by."""
        place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_DEFAULT_REGION": "us-east-1"}
        return {**CREDENTIALS, **place, "AWS_MAX_ATTEMPTS": "1"}

    def come(self) -> None:
        """Answers from now on, at the same port each time, and refuses nothing."""
        from werkzeug.serving import make_server

        self.refused = self.goes = refuses_nothing
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self.port = self._server.port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def go(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: Mapping[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method == "GET":
            self.gets.append(path)
        if self.goes(method, path):
            self.go()
            raise ConnectionError("gone")
        if self.refused(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        return self._app(environ, start)


@contextmanager
def s3_serving() -> Iterator[S3Server]:
    """A server with an empty bucket, which this process and those that it starts find by their environment. Skips the
    test where what it takes is not installed."""
    for package in ("moto", "flask", "flask_cors", "s3fs"):
        pytest.importorskip(package, reason=f"a server of S3's protocol takes {package}: pip install -e '.[dev,s3]'")
    import boto3
    from s3fs import S3FileSystem

    server = S3Server()
    server.come()
    with patch.dict(os.environ, server.environment), patch.object(S3FileSystem, "retries", 1):
        S3FileSystem.clear_instance_cache()
        boto3.client("s3", endpoint_url=server.environment["AWS_ENDPOINT_URL"]).create_bucket(Bucket=BUCKET)
        yield server
        S3FileSystem.clear_instance_cache()
    server.go()
