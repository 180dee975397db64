"""A batch of a thousand lines over HTTP, by OpenAI's own client, beside one whose server and job were killed again and
again: python -m tests.jobs.batch_over_http kills=3 lines=1000 bad=50

Lines are of the client's types, answers are read by them, and the files of both batches must be the same bytes.
"""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
from openai.types import Batch, Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams

from jobs.files.publishing import read_json
from jobs.record.run_dir import RunDirectory

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SETTINGS = ["policy=fixed", "policy.micro_batch_size=16", "policy.num_micro_batches=2", "sampling.max_new_tokens=48"]
END = ("completed", "failed", "cancelled", "expired")
SECONDS = 300.0


def lines(count: int, num_bad: int) -> Iterator[str]:
    """Requests of both urls, with `num_bad` among them that cannot be answered, each for another reason."""
    every = count // num_bad if num_bad else count + 1
    for number in range(count):
        question = f"What is {number % 90} + {number % 7}?"
        if number % every == every - 1 and number // every < num_bad:
            yield (["not JSON", json.dumps({"custom_id": f"r{number}"}), _line(number, CHAT, {"model": "tiny"})])[
                number % 3
            ]
        elif number % 2:
            text: TextParams = {"model": "tiny", "prompt": f"Q: {question}\nA:", "temperature": 1.0, "seed": number}
            yield _line(number, TEXT, {**text})
        else:
            chat: ChatParams = {"model": "tiny", "messages": [{"role": "user", "content": question}], "logprobs": True}
            yield _line(number, CHAT, {**chat})


def _line(number: int, url: str, body: dict[str, object]) -> str:
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body})


@contextmanager
def serving(folder: Path) -> Iterator[openai.OpenAI]:
    """A client of a server over `folder`, which is killed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [f"port={port}", f"output_root={folder}", "model=tiny", *SETTINGS]
    with (folder / "serve.log").open("ab") as log:
        server = subprocess.Popen([sys.executable, "-m", "jobs.serve", *words], stdout=log, stderr=log)
    try:
        key, deadline = folder / "serve" / "api_key", time.monotonic() + SECONDS
        while not key.exists():
            assert server.poll() is None, (folder / "serve.log").read_text()
            assert time.monotonic() < deadline, "no server"
            time.sleep(0.1)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key.read_text().strip(), max_retries=10)
    finally:
        server.kill()
        server.wait()


def finished(client: openai.OpenAI, batch: Batch) -> Batch:
    deadline = time.monotonic() + SECONDS
    while batch.status not in END:
        assert time.monotonic() < deadline, f"{batch.id} is {batch.status} after {SECONDS:.0f} s"
        time.sleep(0.3)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch.errors
    return batch


def begun(client: openai.OpenAI, requests: bytes) -> Batch:
    file = client.files.create(file=("requests.jsonl", io.BytesIO(requests)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def files_of(client: openai.OpenAI, batch: Batch) -> tuple[bytes, bytes]:
    """Its answers and its errors, which name the file that was uploaded: under one name for every upload."""
    ids, name = (batch.output_file_id, batch.error_file_id), batch.input_file_id.encode()
    output, errors = (client.files.content(id).content.replace(name, b"requests") if id else b"" for id in ids)
    return output, errors


def wait_for_parts(run: RunDirectory, most: int) -> None:
    deadline = time.monotonic() + SECONDS
    while (count := num_parts(run)) < most:
        assert time.monotonic() < deadline, f"{count} parts after {SECONDS:.0f} s"
        time.sleep(0.02)


def num_parts(run: RunDirectory) -> int:
    return len(list(run.generations.glob("part-*.parquet")))


def kill_job(run: RunDirectory) -> None:
    pid = read_json(run.lock)["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    assert not run.success.exists(), "it was done before it could be killed"
    print(f"killed behind its server at {num_parts(run)} parts")


def check(output: bytes, errors: bytes, requests: list[str], num_bad: int) -> None:
    """Each answer is of the client's own types, and each line has one."""
    urls = {line["custom_id"]: line["url"] for text in requests if (line := _parsed(text)) and "body" in line}
    answers = [json.loads(text) for text in output.splitlines()]
    failures = [json.loads(text) for text in errors.splitlines()]
    assert (len(answers), len(failures)) == (len(requests) - num_bad, num_bad)
    for answer in answers:
        kind = ChatCompletion if urls[answer["custom_id"]] == CHAT else Completion
        assert kind.model_validate(answer["response"]["body"], strict=True).choices
    assert all(failure["error"]["message"] for failure in failures)


def _parsed(text: str) -> dict[str, str]:
    return json.loads(text) if text.startswith("{") else {}


def main(*, kills: int = 3, count: int = 1000, num_bad: int = 50) -> None:
    requests = list(lines(count, num_bad))
    data = "".join(f"{line}\n" for line in requests).encode()
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        whole.mkdir()
        killed.mkdir()
        with serving(whole) as client:
            batch = finished(client, begun(client, data))
            expected = files_of(client, batch)
        check(*expected, requests, num_bad)
        print(
            f"{len(expected[0].splitlines())} answers and {len(expected[1].splitlines())} errors, of the client's types"
        )
        with serving(killed) as client:
            batch = begun(client, data)
            run = RunDirectory(path=killed / "generate" / batch.id)
            wait_for_parts(run, 1)
        kill_job(run)
        for _ in range(1, kills):
            most = num_parts(run) + count // 32 // (kills + 1)
            with serving(killed):
                wait_for_parts(run, most)
            kill_job(run)
        with serving(killed) as client:
            files = files_of(client, finished(client, client.batches.retrieve(batch.id)))
        for kind, (one, other) in zip(("output", "error"), zip(files, expected, strict=True), strict=True):
            differing = [pair for pair in zip(one.splitlines(), other.splitlines(), strict=True) if pair[0] != pair[1]]
            assert not differing, f"{len(differing)} lines of the {kind} file differ, the first: {differing[0]}"
        print(f"the same {sum(map(len, expected)):,} bytes after {kills} kills")


if __name__ == "__main__":
    names = {"kills": "kills", "lines": "count", "bad": "num_bad"}
    main(**{names[key]: int(value) for key, _, value in (word.partition("=") for word in sys.argv[1:])})
