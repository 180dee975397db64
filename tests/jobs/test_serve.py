"""OpenAI's own client against the routes: what it asks is answered, what is wrong is refused, nothing is left of what
failed, and batches outlive the server."""

import errno
import http.client
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.config.settings import GenerateConfig
from jobs.record.run_dir import RunDirectory
from jobs.record.run_reader import is_locked
from jobs.serve import collect_settings
from jobs.serving.answers import Answers
from jobs.serving.config import ServeConfig, absolute_path_settings, job_settings
from jobs.serving.keeper import Keeper
from jobs.serving.store import BatchStore, FileInUseError, UploadLimitError
from runtime.errors import ConfigError, OutputError

openai = pytest.importorskip("openai", reason="needs the extra: pip install -e '.[client]'")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra: pip install -e '.[serve]'")
pytest.importorskip("starlette", reason="needs the extra: pip install -e '.[serve]'")
pytest.importorskip("python_multipart", reason="needs the extra: pip install -e '.[serve]'")

URL = "/v1/completions"
KEY = "a key of the tests"


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def client_of(port: int, key: str = KEY) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def wait_for(what: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.1)


def lines(count: int, **body: object) -> bytes:
    asked = {"model": "m", "prompt": "Hi", **body}
    requests = [{"custom_id": f"r{n}", "method": "POST", "url": URL, "body": asked} for n in range(count)]
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """Routes over a keeper that does nothing, in a thread."""
    from jobs.serving.app import make_app
    from jobs.serving.server import _Connection

    config = ServeConfig(port=free_port(), max_file_mib=1, output_root=str(folder))
    store = BatchStore(folder)
    keeper = Keeper(store, [], folder)
    app = make_app(config, store, keeper, Answers(config, GenerateConfig(), folder, keeper), KEY, ["org/model"])
    server = uvicorn.Server(uvicorn.Config(app, port=config.port, http=_Connection, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    yield config.port
    server.should_exit = True
    thread.join()


def answer(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
    """Status and body of what is asked without a client that would put it right."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {"Authorization": f"Bearer {KEY}", "Content-Length": str(len(body)), **named}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.putrequest(method, path, skip_host="Host" in sent)
        for name, value in sent.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders(body)
        found = connection.getresponse()
        return found.status, found.read().decode()


def form(data: bytes) -> bytes:
    head = b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--XX\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return head + data + b"\r\n--XX--\r\n"


FORM = "multipart/form-data; boundary=XX"


def test_a_file_comes_back_as_it_was_sent(port: int) -> None:
    client = client_of(port)
    sent = client.files.create(file=("ä.jsonl", lines(3)), purpose="batch")
    assert (sent.filename, sent.bytes, sent.purpose, sent.status) == ("ä.jsonl", len(lines(3)), "batch", "processed")
    assert client.files.retrieve(sent.id) == sent
    assert client.files.content(sent.id).content == lines(3)
    assert sent in list(client.files.list())


def test_a_batch_is_of_openais_own_type_and_waits(port: int) -> None:
    client = client_of(port)
    file = client.files.create(file=("a.jsonl", lines(3)), purpose="batch")
    asked = {"endpoint": URL, "completion_window": "24h", "metadata": {"a": "b"}}
    batch = client.batches.create(input_file_id=file.id, **asked)
    openai.types.Batch.model_validate(batch.to_dict(), strict=True)
    assert (batch.status, batch.request_counts.total, batch.metadata) == ("validating", 3, {"a": "b"})
    assert client.batches.retrieve(batch.id) == batch
    assert client.batches.list().data[0] == batch
    assert client.batches.cancel(batch.id).status == "cancelling"


def refused(call: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as error:
        call()
    return error.value.status_code, error.value.body["message"]


def test_what_is_wrong_is_refused_by_an_error_object(port: int) -> None:
    client = client_of(port)
    file = client.files.create(file=("a.jsonl", lines(1)), purpose="batch").id

    def batch(**settings: object) -> tuple[int, str]:
        asked = {"input_file_id": file, "endpoint": URL, "completion_window": "24h", **settings}
        return refused(lambda: client.batches.create(**asked))

    assert refused(lambda: client.files.create(file=b"x", purpose="vision")) == (400, "purpose must be 'batch'")
    assert batch(endpoint="/v1/responses")[0] == 400
    assert batch(input_file_id="file-0") == (404, "there is no such file")
    assert batch(input_file_id="../../run") == (404, "there is no such file")
    assert batch(output_expires_after={"anchor": "created_at", "seconds": 9})[1].startswith("'output_expires_after'")
    assert refused(lambda: client.batches.retrieve("batch_x")) == (404, "there is no such batch")
    assert refused(lambda: client.files.content("file-x")) == (404, "there is no such file")
    assert refused(lambda: client.files.list(after="file-0")) == (400, "after is not the id of a listed object")
    assert refused(lambda: client.batches.list(limit=101)) == (400, "limit must be 1 to 100")


def test_an_upload_that_is_too_long_gets_its_answer_and_no_reset(port: int) -> None:
    for key, expected in ((KEY, 413), ("another", 401)):
        said = {"Content_Type": FORM, "Connection": "close", "Authorization": f"Bearer {key}"}
        status, text = answer(port, "POST", "/v1/files", form(b"x" * (24 << 20)), **said)
        assert status == expected
        assert "the limit is max_file_mib=1" in text or key == "another"
    waits = answer(port, "POST", "/v1/files", b"", Content_Length="99999999", Expect="100-continue")
    assert waits[0] == 413, "who asks first need not send it"


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Origin": "http://evil.example"}, b"{}", 403),
        ({"Sec_Fetch_Site": "cross-site"}, b"{}", 403),
        ({"Host": "evil.example"}, b"{}", 403),
        ({"Host": "evil.example#@127.0.0.1"}, b"{}", 403),
        ({"Host": "["}, b"{}", 403),
        ({"Host": "127.0.0.1:80:80"}, b"{}", 403),
        ({"Authorization": ""}, b"{}", 401),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, b"{}", 401),
        ({"Content_Length": "", "Transfer_Encoding": "chunked"}, b"2\r\n{}\r\n0\r\n\r\n", 411),
        ({}, b"[]", 400),
        ({}, b"[" * 200_000, 400),
        ({}, b"\xff", 400),
    ],
)
def test_what_no_client_sends_is_refused_too(port: int, headers: dict[str, str], body: bytes, status: int) -> None:
    found, said = answer(port, "POST", "/v1/batches", body, **headers)
    assert (found, "message" in json.loads(said)["error"]) == (status, True)


@pytest.mark.parametrize("charset", ["punycode", "idna", "rot13", "utf-9", "unicode_escape"])
def test_a_form_in_an_odd_charset_is_no_mistake_of_the_server(port: int, charset: str) -> None:
    odd = form(b"{}").replace(b"a.jsonl", b"\\ud800.jsonl")
    status, _ = answer(port, "POST", "/v1/files", odd, Content_Type=f"{FORM}; charset={charset}")
    assert status in (200, 400)
    assert answer(port, "GET", "/v1/files")[0] == 200


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"metadata": {"note": "\ud83d"}}, "lone surrogate"),
        ({"metadata": {"\ud83d": "note"}}, "lone surrogate"),
        ({"metadata": {"note": 1}}, "is not text"),
        ({"metadata": []}, "object"),
        ({"metadata": {str(n): "" for n in range(17)}}, "16"),
        ({"metadata": {"k" * 65: ""}}, "64"),
        ({"metadata": {"k": "x" * 513}}, "512"),
        ({"completion_window": "\ud800"}, "lone surrogate"),
        ({"completion_window": 24}, "is not text"),
        ({"completion_window": "h" * 65}, "64"),
        ({"input_file_id": "\ud800"}, "lone surrogate"),
        ({"endpoint": "\ud800"}, "endpoint"),
        ({"\ud800": 1}, "is not supported"),
    ],
)
def test_what_cannot_be_sent_back_is_refused_before_anything_is_stored(
    port: int, folder: Path, odd: dict[str, object], what: str
) -> None:
    file = client_of(port).files.create(file=("a.jsonl", lines(1)), purpose="batch").id
    before = sorted((folder / "batches").iterdir())
    asked = {"input_file_id": file, "endpoint": URL, "completion_window": "24h", **odd}
    status, said = answer(port, "POST", "/v1/batches", json.dumps(asked).encode())
    assert (status, what in said) == (400, True), said
    assert sorted((folder / "batches").iterdir()) == before
    assert answer(port, "GET", "/v1/batches")[0] == 200


def test_metadata_may_be_as_large_as_openai_has_it(port: int) -> None:
    client = client_of(port)
    file = client.files.create(file=("a.jsonl", lines(1)), purpose="batch")
    most = {f"{n:064}": "\N{GRINNING FACE}" * 512 for n in range(16)}
    batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h", metadata=most)
    assert client.batches.retrieve(batch.id).metadata == most


def test_lists_come_in_pages_and_files_go_when_they_are_deleted(port: int) -> None:
    client = client_of(port)
    files = [client.files.create(file=(f"{n}.jsonl", lines(1)), purpose="batch").id for n in range(3)]
    listed = [file.id for file in client.files.list()]
    assert [file.id for file in client.files.list(limit=1)] == listed, "page by page, to the end"
    assert [file.id for file in client.files.list(order="asc")] == listed[::-1]
    page = client.files.list(limit=1, after=listed[0])
    assert ([file.id for file in page.data], page.has_more) == (listed[1:2], True)
    assert client.files.list(after=listed[-1]).data == []
    asked = {"endpoint": URL, "completion_window": "24h"}
    batches = [client.batches.create(input_file_id=files[0], **asked).id for _ in range(3)]
    assert {*batches} <= {batch.id for batch in client.batches.list(limit=2)}
    assert refused(lambda: client.files.delete(files[0]))[0] == 409, "batches read it"
    assert client.files.delete(files[1]).deleted
    assert refused(lambda: client.files.retrieve(files[1])) == (404, "there is no such file")
    assert files[1] not in [file.id for file in client.files.list()]


def test_who_asks_for_something_else_is_told_what_there_is(port: int) -> None:
    client = client_of(port)
    assert [model.id for model in client.models.list()] == ["org/model"]
    assert client.models.retrieve("org/model").id == "org/model"
    single = refused(lambda: client.embeddings.create(model="m", input="a"))
    assert single == (404, "/v1/embeddings is answered in batches only: POST /v1/files, then POST /v1/batches")
    other = refused(lambda: client.responses.create(model="m", input="a"))
    supported = "send single requests to /v1/chat/completions or /v1/completions"
    assert other == (404, f"/v1/responses is not supported: {supported}")
    status, said = answer(port, "GET", "/")
    assert (status, "POST /v1/batches" in said, "DELETE /v1/files/{id}" in said) == (404, True, True)
    assert answer(port, "PUT", "/v1/files")[0] == 405
    status, said = answer(port, "GET", "/metrics")
    assert (status, 'weightstream_batches{status="completed"} 0\n' in said) == (200, True)
    assert answer(port, "GET", "/metrics", Authorization="")[0] == 401


def test_health_says_without_a_key_whether_batches_are_worked_on(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from jobs.serving.app import make_app

    store = BatchStore(tmp_path)
    keeper = Keeper(store, [], tmp_path)
    answers = Answers(ServeConfig(), GenerateConfig(), tmp_path, keeper)
    with TestClient(make_app(ServeConfig(), store, keeper, answers, KEY), base_url="http://127.0.0.1") as client:
        assert client.get("/health").status_code == 503
        keeper.start()
        assert client.get("/health").json() == {"status": "ok"}
        keeper.stop()
        keeper.join()
        assert client.get("/health").status_code == 503


def test_nothing_is_left_of_an_upload_whose_client_left_and_the_log_is_quiet(
    port: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = sorted((folder / "files").iterdir())
    caplog.set_level(logging.DEBUG)
    with socket.create_connection(("127.0.0.1", port)) as half:
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: {FORM}\r\n"
        half.sendall(head.encode() + b"Content-Length: 300000\r\n\r\n" + form(b"x" * 9000)[:5000])
        time.sleep(0.2)
    wait_for(lambda: "the client left" in caplog.text)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert sorted((folder / "files").iterdir()) == before


def test_a_connection_that_asks_nothing_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.serving.server.IDLE_SECONDS", 0.2)
    for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as idle:
            idle.sendall(sent)
            with suppress(ConnectionResetError):
                while idle.recv(9999):
                    pass


def test_idle_and_half_sent_connections_keep_nobody_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.serving.server._max_connections", lambda: 4)
    half = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\n"
    others = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(12)]
    for number, other in enumerate(others):
        with suppress(OSError):
            other.sendall(half.encode() if number % 2 else b"")
    assert answer(port, "GET", "/health")[0] == 503
    with suppress(ConnectionResetError):
        assert others[0].recv(1) == b"", "the one that is silent the longest is closed"
    for other in others:
        other.close()


def full(*args: object, **settings: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_nothing_is_left_of_an_upload_that_found_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path)
    with pytest.raises(OutputError):
        store.add_upload(SimpleNamespace(read=full), "a")  # pyright: ignore[reportArgumentType]
    with monkeypatch.context() as patch:
        patch.setattr("jobs.serving.store.write_json", full)
        with pytest.raises(OSError, match="No space"):
            store.add_upload(io.BytesIO(lines(1)), "a")
    assert (list((tmp_path / "files").iterdir()), store.files()) == ([], [])
    (tmp_path / "files" / f"file-{'0' * 24}.jsonl").write_bytes(b"of a server that was killed before it had a record")
    BatchStore(tmp_path)
    assert list((tmp_path / "files").iterdir()) == []


def test_files_have_room_together_and_count_while_they_come(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    store.add_upload(io.BytesIO(b"12345"), "a")
    with store.reserve_space(5, 2, 10):
        for files, num_bytes, key in ((2, 99, "max_files=2"), (9, 10, "max_uploads_gib")):
            with pytest.raises(UploadLimitError, match=key), store.reserve_space(1, files, num_bytes):
                pass
    with store.reserve_space(5, 2, 10):
        pass


ODD = ["", "{", "[]", "{}", "[" * 99_999, '{"id":"ID"}', '{"id":"ID","created_at":1e999}']


@pytest.mark.parametrize("odd", [*ODD, "surrogate", "types", "FIFO", "/dev/zero"])
def test_an_odd_record_costs_itself_and_one_warning(tmp_path: Path, odd: str, caplog: pytest.LogCaptureFixture) -> None:
    store = BatchStore(tmp_path)
    file = store.add_upload(io.BytesIO(lines(1)), "a")
    kept = store.add_batch(str(file["id"]), URL, "24h", {"a": "b"}, 1)
    assert kept is not None
    for folder, id in (("files", f"file-{'0' * 24}"), ("batches", f"batch_{'0' * 24}")):
        path = tmp_path / folder / f"{id}.json"
        like = json.dumps({**(file if folder == "files" else kept), "id": id})
        if odd == "FIFO":
            os.mkfifo(path)
        elif odd == "/dev/zero":
            path.symlink_to(odd)
        elif odd == "surrogate":
            path.write_text(like.replace('"24h"', r'"\ud800"').replace('"filename": "a"', r'"filename": "\ud800"'))
        elif odd == "types":
            path.write_text(like.replace(str(kept["created_at"]), '"1"'))
        else:
            path.write_text(odd.replace("ID", id))
    again = BatchStore(tmp_path)
    assert (again.files(), again.batches()) == ([file], [kept])
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert all("0" * 24 + ".json is ignored" in said for said in warned)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Has jobs be a script that does what a test says, in place of a model: `run` is its directory, `starts` a file
    with a line for each start."""

    def make(body: str) -> Path:
        fake, starts = tmp_path / "job", tmp_path / "starts"
        fake.write_text(
            f"#!{sys.executable} -IS\n"
            "import os, signal, sys, time, pathlib\n"
            "said = dict(word.split('=', 1) for word in sys.argv if '=' in word)\n"
            "run = pathlib.Path(said['output_root'].strip('\"'), 'generate', said['run'])\n"
            "run.mkdir(parents=True, exist_ok=True)\n"
            f"starts = pathlib.Path({str(starts)!r})\n"
            "assert sys.argv[1:3] == ['-P', '-m']\n"
            "assert pathlib.Path.cwd().stat().st_mode & 0o077 == 0, 'nobody else can write there'\n"
            "with starts.open('a') as file: file.write(said['run'] + '\\n')\n"
            "def succeed():\n"
            '    (run / \'output.jsonl\').write_text(\'{"response":{"body":{"usage":{"prompt_tokens":7}}}}\\n\')\n'
            "    (run / '_SUCCESS.json').write_text('{}')\n"
            f"{textwrap.dedent(body)}\n"
        )
        fake.chmod(0o755)
        monkeypatch.setattr("jobs.serving.keeper.sys", SimpleNamespace(executable=str(fake)))
        monkeypatch.setattr("jobs.serving.keeper.POLL_SECONDS", 0.02)
        monkeypatch.setattr("jobs.serving.keeper.MAX_PAUSE_SECONDS", 0.05)
        starts.touch()
        return starts

    return make


def stored(root: Path, num_batches: int = 1) -> tuple[BatchStore, list[str]]:
    store = BatchStore(root / "serve")
    file = str(store.add_upload(io.BytesIO(lines(1)), "a")["id"])
    return store, [str((store.add_batch(file, URL, "24h", None, 1) or {})["id"]) for _ in range(num_batches)]


@contextmanager
def keeping(store: BatchStore, root: Path) -> Iterator[Keeper]:
    keeper = Keeper(store, [], root)
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.stop()
        keeper.join()


def status(store: BatchStore, id: str) -> str:
    return str((store.batch(id) or {})["status"])


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("jobs.serving.store.write_json", errno.ENOSPC),
        ("jobs.serving.keeper.subprocess.Popen", errno.EMFILE),
        ("jobs.serving.keeper.is_locked", errno.EMFILE),
        ("jobs.serving.keeper.Keeper._finish", errno.ENOSPC),
        ("jobs.serving.keeper.Keeper._finish", None),
        ("jobs.serving.keeper.Keeper._step", None),
    ],
)
def test_what_passes_never_fails_a_batch_nor_ends_the_keeper(
    tmp_path: Path, job: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, place: str, number: int | None
) -> None:
    starts = job("succeed()")
    store, (id, other) = stored(tmp_path, 2)
    seen: list[str] = []

    def failing(*args: object, **settings: object) -> None:
        seen.append(status(store, id))
        raise ValueError("nobody foresaw it") if number is None else OSError(number, "it passes")

    with keeping(store, tmp_path) as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(place, failing)
            keeper.wake()
            wait_for(lambda: len(seen) > 6)
        wait_for(lambda: {status(store, id), status(store, other)} == {"completed"})
        assert keeper.is_alive()
    assert "failed" not in seen
    assert sorted(starts.read_text().split()) == sorted([id, other]), "no job twice"


def test_a_job_that_is_killed_or_interrupted_is_started_again_as_long_as_it_gets_further(
    tmp_path: Path, job: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.serving.keeper.MAX_FAILURES", 3)
    starts = job("""
        number = starts.read_text().count("\\n")
        (run / "generations").mkdir(exist_ok=True)
        if number < 6:
            (run / "generations" / f"part-{number}.parquet").touch()
            sys.exit(75) if number % 2 else os.kill(os.getpid(), signal.SIGKILL)
        succeed()
    """)
    store, (id,) = stored(tmp_path)
    with keeping(store, tmp_path):
        wait_for(lambda: status(store, id) == "completed")
    assert len(starts.read_text().split()) == 6
    starts = job("os.kill(os.getpid(), signal.SIGKILL)")
    starts.write_text("")
    store, (id,) = stored(tmp_path)
    with keeping(store, tmp_path):
        wait_for(lambda: status(store, id) == "failed")
    assert len(starts.read_text().split()) == 3
    assert "3 times without progress; the last time: its job was killed by signal 9" in json.dumps(store.batch(id))


def test_a_job_that_refuses_fails_its_batch_with_its_own_words(tmp_path: Path, job: Callable[[str], Path]) -> None:
    job("print('error: no such model'); sys.exit(2)")
    store, (id,) = stored(tmp_path)
    with keeping(store, tmp_path):
        wait_for(lambda: status(store, id) == "failed")
    assert '"message": "no such model"' in json.dumps(store.batch(id))


def test_a_job_that_ends_without_a_word_of_its_own_is_started_again(tmp_path: Path, job: Callable[[str], Path]) -> None:
    starts = job("""
        number = starts.read_text().count("\\n")
        if number == 1:
            print("error: of the first start", flush=True)
        sys.exit([75, 2, 120, 1][number - 1]) if number < 5 else succeed()
    """)
    store, (id,) = stored(tmp_path)
    with keeping(store, tmp_path):
        wait_for(lambda: status(store, id) in ("completed", "failed"))
    assert (status(store, id), len(starts.read_text().split())) == ("completed", 5)


def test_the_next_server_never_doubles_a_job_that_has_not_locked_its_run_yet(
    tmp_path: Path, job: Callable[[str], Path]
) -> None:
    starts = job("while not (run / 'go').exists(): time.sleep(0.01)\nsucceed()")
    store, (first, second) = stored(tmp_path, 2)
    with keeping(store, tmp_path):
        wait_for(starts.read_text)
    again = BatchStore(tmp_path / "serve")  # as after kill -9: its job knows nothing of it
    running = starts.read_text().strip()
    with keeping(again, tmp_path):
        time.sleep(0.3)
        assert (starts.read_text().split(), status(again, running)) == ([running], "in_progress")
        for id in (first, second):
            (tmp_path / "generate" / id).mkdir(exist_ok=True)
            (tmp_path / "generate" / id / "go").touch()
        wait_for(lambda: {status(again, first), status(again, second)} == {"completed"})
    assert sorted(starts.read_text().split()) == sorted([first, second])
    assert (again.batch(first) or {})["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert (again.batch(first) or {})["tokens"] == {"prompt_tokens": 7, "completion_tokens": 0}


def test_a_batch_that_waits_is_cancelled_at_once_and_never_begins(tmp_path: Path, job: Callable[[str], Path]) -> None:
    starts = job("while not (run / 'go').exists(): time.sleep(0.01)\nsucceed()")
    store, ids = stored(tmp_path, 2)
    with keeping(store, tmp_path) as keeper:
        wait_for(starts.read_text)
        running = starts.read_text().strip()
        (waiting,) = {*ids} - {running}
        store.set_status(waiting, "cancelling")
        keeper.wake()
        wait_for(lambda: status(store, waiting) == "cancelled")
        assert status(store, running) == "in_progress"
        with pytest.raises(FileInUseError):
            store.delete_file(str((store.batch(running) or {})["input_file_id"]))
        (tmp_path / "generate" / running / "go").touch()
        wait_for(lambda: status(store, running) == "completed")
        store.set_status(running, "cancelling")
        assert status(store, running) == "completed", "an end is an end"
    assert starts.read_text().split() == [running]


def test_a_cancel_that_comes_just_before_the_job_keeps_it_from_starting(
    tmp_path: Path, job: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = job("succeed()")
    store, (id,) = stored(tmp_path)
    change = store.update_batch

    def cancelled_first(*args: object) -> object:
        monkeypatch.setattr(store, "update_batch", change)
        store.set_status(id, "cancelling")
        return change(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(store, "update_batch", cancelled_first)
    with keeping(store, tmp_path):
        wait_for(lambda: status(store, id) == "cancelled")
    assert starts.read_text() == ""


def test_a_job_loads_no_code_of_the_folder_that_the_server_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = tmp_path / "evil"
    (evil / "jobs").mkdir(parents=True)
    for place in ("yaml.py", "hydra.py", "jobs/__init__.py", "sitecustomize.py"):
        (evil / place).write_text("raise SystemExit('evil code ran')")
    monkeypatch.chdir(evil)
    store, (id,) = stored(tmp_path)
    keeper = Keeper(store, ["model=no_such_model"], tmp_path)
    keeper.start()
    wait_for(lambda: status(store, id) == "failed")
    keeper.stop()
    assert "evil" not in store.log_path(id).read_text()
    assert "model=no_such_model does not exist" in json.dumps(store.batch(id))


def test_paths_of_settings_mean_what_they_meant_where_the_server_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a model").mkdir()
    values = {"model.path": "a model", "model.tokenizer": "org/hub", "offload.cache_dir": "c", "model.name": "a model"}
    assert absolute_path_settings(values) == [f'model.path="{tmp_path}/a model"', f'offload.cache_dir="{tmp_path}/c"']
    assert (
        absolute_path_settings({"model.path": "/a", "sampling.json_schema": "{" * 9999, "model.tokenizer": "s3://b/c"})
        == []
    )


def test_two_servers_never_share_a_directory_nor_a_port(tmp_path: Path) -> None:
    from jobs.serving.server import _lock_server_folder, _open_listener

    config = ServeConfig(port=free_port(), output_root=str(tmp_path))
    with (
        _lock_server_folder(tmp_path, config),
        pytest.raises(ConfigError, match=f"output_root={tmp_path}"),
        _lock_server_folder(tmp_path, config),
    ):
        pass
    with _open_listener(config), pytest.raises(ConfigError, match=f"port={config.port}"), _open_listener(config):
        pass


def test_a_key_is_made_once_for_its_owner_alone_and_one_that_others_read_is_refused(tmp_path: Path) -> None:
    from jobs.files.publishing import private_umask
    from jobs.serving.server import _api_key

    with private_umask():
        made = _api_key(ServeConfig(), tmp_path)
    assert (tmp_path / "api_key").stat().st_mode & 0o777 == 0o600
    assert _api_key(ServeConfig(), tmp_path) == made
    own = tmp_path / "own"
    for text, mode, said in (
        ("k" * 40, 0o644, "chmod 600"),
        ("short", 0o600, "16 characters"),
        ("ä" * 40, 0o600, "read"),
    ):
        own.write_text(text)
        own.chmod(mode)
        with pytest.raises(ConfigError, match=said):
            _api_key(ServeConfig(api_key_file=str(own)), tmp_path)
    with pytest.raises(ConfigError, match=r"needs host=127\.0\.0\.1"):
        ServeConfig(host="0.0.0.0", require_api_key=False)
    with pytest.raises(ConfigError, match="readable only by the server's user"):
        ServeConfig(settings=["output_private=false"])


def test_a_warning_that_repeats_comes_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.serving.server import _RepeatFilter

    now = [0.0]
    monkeypatch.setattr("jobs.serving.server.time", SimpleNamespace(monotonic=lambda: now[0]))
    repeats, said = _RepeatFilter(), []
    for second in range(0, 150):
        now[0] = float(second)
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "no descriptors", (), None)
        if repeats.filter(record):
            said.append(record.getMessage())
        other = logging.LogRecord("", logging.WARNING, "", 0, "another %d", (second,), None)
        assert repeats.filter(other)
    assert said == ["no descriptors", *["no descriptors (59 repeats)"] * 2]


def test_only_this_machine_is_loopback_and_settings_of_jobs_are_told_from_its_own() -> None:
    hosts = {"localhost": True, "127.0.0.1": True, "::1": True, "0.0.0.0": False, "me.example": False}
    assert {host: ServeConfig(host=host).is_loopback for host in hosts} == hosts
    words = ["port=1", "model=hf", 'model.path="a b"', "--cfg", "job"]
    assert collect_settings(words) == ["port=1", "--cfg", "job", r'settings=["model=hf","model.path=\"a b\""]']
    both = ["model=hf", "encode.pooling=mean"]
    assert (job_settings("generate", both), job_settings("encode", both)) == (["model=hf"], both)
    with pytest.raises(ConfigError, match="the server sets it for each batch"):
        ServeConfig(settings=["run=mine"])


@contextmanager
def server(port: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "jobs.serve", f"port={port}", f"output_root={folder}", "checkpoint_seconds=1"]
    fixed = ["policy=fixed", "policy.micro_batch_size=4", "policy.num_micro_batches=1"]
    with (folder / "server.log").open("ab") as log, subprocess.Popen([*command, *fixed], stderr=log) as process:
        try:
            wait_for(lambda: process.poll() is None and answers(port))
            yield process
        finally:
            process.kill()


def answers(port: int) -> bool:
    with closing(socket.socket()) as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def embedded(client: "openai.OpenAI", folder: Path) -> "openai.types.CreateEmbeddingResponse":
    """What a batch of embeddings over HTTP has come to, in which one line is for another job."""
    asked = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": ["Hi", "Ho"]}}
    file = client.files.create(file=("e.jsonl", json.dumps(asked).encode() + b"\n" + lines(1)), purpose="batch")
    sent = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    wait_for(lambda: client.batches.retrieve(sent.id).status == "completed")
    done = client.batches.retrieve(sent.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    assert (folder / "encode" / sent.id / "generations").is_dir()
    result = json.loads(client.files.content(done.output_file_id).text)
    return openai.types.CreateEmbeddingResponse.model_validate(result["response"]["body"], strict=True)


@pytest.mark.slow("jobs/test_serve.py::test_the_next_server_never_doubles_a_job_that_has_not_locked_its_run_yet")
def test_a_job_outlives_its_server_and_the_next_one_takes_it_up(tmp_path: Path) -> None:
    port, client_id = free_port(), {"endpoint": URL, "completion_window": "24h"}
    with server(port, tmp_path) as first:
        client = client_of(port, (tmp_path / "serve" / "api_key").read_text().strip())
        file = client.files.create(file=("a.jsonl", lines(4000, max_tokens=100)), purpose="batch")
        long = client.batches.create(input_file_id=file.id, **client_id)
        run = RunDirectory(path=tmp_path / "generate" / long.id)
        wait_for(lambda: is_locked(run.lock) and list(run.generations.glob("part-*")))
        os.kill(first.pid, signal.SIGKILL)
    assert is_locked(run.lock), "its job goes on"
    with server(port, tmp_path):
        assert client.batches.retrieve(long.id).status == "in_progress"
        client.batches.cancel(long.id)
        file = client.files.create(file=("a.jsonl", lines(3, max_tokens=1) + b"{}\n"), purpose="batch")
        short = client.batches.create(input_file_id=file.id, **client_id)
        wait_for(lambda: client.batches.retrieve(long.id).status == "cancelled")
        cut = client.batches.retrieve(long.id)
        assert 0 < cut.request_counts.completed < cut.request_counts.total == 4000
        assert len(client.files.content(cut.output_file_id).text.splitlines()) == cut.request_counts.completed
        assert not is_locked(run.lock)
        wait_for(lambda: client.batches.retrieve(short.id).status == "completed")
        done = client.batches.retrieve(short.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (3, 1)
        results = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        assert [result["custom_id"] for result in results] == ["r0", "r1", "r2"]
        assert all(openai.types.Completion.model_validate(result["response"]["body"]) for result in results)
        failed = json.loads(client.files.content(done.error_file_id).text)
        assert "custom_id is null" in failed["error"]["message"]
        vectors = embedded(client, tmp_path)
        assert [vector.index for vector in vectors.data] == [0, 1]
        assert sum(number**2 for number in vectors.data[1].embedding) == pytest.approx(1)
    assert "Traceback" not in (tmp_path / "server.log").read_text()
    made = [*(tmp_path / "serve").rglob("*"), *(tmp_path / "generate").rglob("*"), tmp_path / "serve"]
    assert [path for path in made if path.stat().st_mode & 0o077] == [], "whatever the umask"
