"""OpenAI's own client against the routes: what it asks is answered, what is wrong is refused, and batches outlive the
server."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from jobs.run.found import is_locked
from jobs.run.run_dir import RunDirectory
from jobs.serve import with_settings
from jobs.serving.config import ServeConfig, settings_of
from runtime.errors import ConfigError

openai = pytest.importorskip("openai", reason="needs the extra: pip install -e '.[client]'")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra: pip install -e '.[serve]'")
pytest.importorskip("starlette", reason="needs the extra: pip install -e '.[serve]'")
pytest.importorskip("python_multipart", reason="needs the extra: pip install -e '.[serve]'")

URL = "/v1/completions"


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def client_of(port: int) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


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
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Routes over a keeper that does nothing, in a thread."""
    from jobs.serving.app import make_app
    from jobs.serving.keeper import Keeper
    from jobs.serving.store import BatchStore

    folder = tmp_path_factory.mktemp("served")
    config = ServeConfig(port=free_port(), max_file_mib=1, output_root=str(folder))
    store = BatchStore(folder)
    app = make_app(config, store, Keeper(store, [], folder))
    server = uvicorn.Server(uvicorn.Config(app, port=config.port, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    yield config.port
    server.should_exit = True
    thread.join()


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
    assert refused(lambda: client.models.list())[0] == 404
    too_long = refused(lambda: client.files.create(file=b"x" * (2 << 20), purpose="batch"))
    assert too_long[0] == 413
    assert too_long[1].endswith("max_file_mib=1 is the most")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Origin": "http://evil.example"}, b"{}", 403),
        ({"Host": "evil.example"}, b"{}", 403),
        ({"Transfer-Encoding": "chunked"}, b"2\r\n{}\r\n0\r\n\r\n", 411),
        ({}, b"[]", 400),
        ({}, b"[" * 200_000, 400),
        ({}, b"\xff", 400),
    ],
)
def test_what_no_client_sends_is_refused_too(port: int, headers: dict[str, str], body: bytes, status: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.putrequest("POST", "/v1/batches", skip_host="Host" in headers)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if (name, "Transfer-Encoding") != ("Content-Length", next(iter(headers), "")):
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        assert (answer.status, "message" in json.loads(answer.read())["error"]) == (status, True)


def test_only_this_machine_is_loopback_and_settings_of_jobs_are_told_from_its_own() -> None:
    hosts = {"localhost": True, "127.0.0.1": True, "::1": True, "0.0.0.0": False, "me.example": False}
    assert {host: ServeConfig(host=host).is_loopback for host in hosts} == hosts
    words = ["port=1", "model=hf", 'model.path="a b"', "--cfg", "job"]
    assert with_settings(words) == ["port=1", "--cfg", "job", r'settings=["model=hf","model.path=\"a b\""]']
    both = ["model=hf", "encode.pooling=mean"]
    assert (settings_of("generate", both), settings_of("encode", both)) == (["model=hf"], both)
    with pytest.raises(ConfigError, match="which the server sets for each batch"):
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


def test_a_job_outlives_its_server_and_the_next_one_takes_it_up(tmp_path: Path) -> None:
    port, client_id = free_port(), {"endpoint": URL, "completion_window": "24h"}
    client = client_of(port)
    with server(port, tmp_path) as first:
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
