"""A server of batches that is killed, filled up, crowded and lied to, for as long as one says:
python -m tests.jobs.serve_soak seconds=600 connections=200 seed=0

It goes on 127.0.0.1 alone. The server and its jobs are killed, their disk is full for seconds (a tmpfs for root, else a
limit on file sizes), odd records appear, and up to so many connections idle, leave, or ask odd things. In the end every
batch that is stored must have ended as it should: completed with each row once, cancelled, or failed for its reason.
"""

import http.client
import io
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import openai

from jobs.record.run_dir import RunDirectory
from jobs.record.run_reader import is_locked
from runtime.units import KIB, MIB

URL = "/v1/completions"
SETTINGS = ["policy=fixed", "policy.micro_batch_size=4", "policy.num_micro_batches=1", "checkpoint_seconds=1"]
SETTINGS += ["model=tiny", "max_file_mib=1", "log_level=info"]
DISK_MIB = 64
END = ("completed", "failed", "cancelled")
OPEN_BATCHES = 4  # that are not ended, at a time
SECONDS_EACH = 120.0  # for a batch that is left when the disturbances end
THREADS = 20
ODD_RECORDS = ["", "{", "[]", "{}", "[" * 9999, '{"id": "ID", "status": "validating"}', "\x00\xff"]
NO_SERVER = (OSError, http.client.HTTPException, openai.APIConnectionError)


class Soak:
    """What is known of one run: the folder, the server's process, what was seen."""

    def __init__(self, folder: Path, seconds: float, connections: int, seed: int, is_mounted: bool):
        self.folder, self.connections, self.is_mounted = folder, connections, is_mounted
        self.random, self.end = random.Random(seed), time.monotonic() + seconds
        acts = ["disk", "server", "job", "records", "stop job", "server", "job"]
        self.acts = [act for _ in range(1000) for act in self.random.sample(acts, len(acts))]
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.server: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    @property
    def log(self) -> Path:
        return self.folder.parent / "serve.log"

    @property
    def key(self) -> str:
        return (self.folder / "serve" / "api_key").read_text().strip()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=self.key, max_retries=0, timeout=30)

    def start(self) -> None:
        words = [f"port={self.port}", f"output_root={self.folder}", *SETTINGS]
        while True:
            with self.log.open("ab") as log:
                self.server = subprocess.Popen([sys.executable, "-m", "jobs.serve", *words], stdout=log, stderr=log)
            deadline = time.monotonic() + SECONDS_EACH
            while self.server.poll() is None and time.monotonic() < deadline:
                with suppress(*NO_SERVER):
                    if self.ask("GET", "/health")[0] == 200:
                        return
                time.sleep(0.2)
            if self.server.poll() is None:
                raise AssertionError(f"no answer in {SECONDS_EACH:.0f} s")
            self.counts["starts that found no room"] += 1  # it cannot begin on a full disk
            time.sleep(1)

    def kill(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body or None, {"Connection": "close", **headers})
            found = connection.getresponse()
            return found.status, found.read()


def lines(count: int, max_tokens: int) -> bytes:
    """Requests with a line among them that cannot be answered."""
    body = {"model": "m", "prompt": "Q: 1 + 1?\nA:", "max_tokens": max_tokens, "ignore_eos": True}
    requests = [{"custom_id": f"r{n}", "method": "POST", "url": URL, "body": body} for n in range(count)]
    requests[count // 2]["url"] = "/v1/nothing"
    return "".join(f"{json.dumps(line)}\n" for line in requests).encode()


def submit(soak: Soak) -> None:
    """Keeps batches coming until the time is over. What the server stored and could not answer is found in its list."""
    kinds = random.Random(1)
    while not soak.is_over:
        with suppress(*NO_SERVER, openai.APIStatusError):
            client = soak.client()
            left = [batch for batch in client.batches.list(limit=100).data if batch.status not in END]
            if len(left) < OPEN_BATCHES:
                kind = kinds.choice(["whole", "whole", "long", "cancelled", "empty"])
                data = {"empty": b"\n", "long": lines(48, 60)}.get(kind, lines(kinds.randint(3, 24), 12))
                file = client.files.create(file=("a.jsonl", io.BytesIO(data)), purpose="batch")
                request = {"endpoint": URL, "completion_window": "24h"}
                batch = client.batches.create(input_file_id=file.id, metadata={"kind": kind}, **request)  # pyright: ignore[reportArgumentType, reportCallIssue]
                soak.counts["batches asked for"] += 1
                if kind == "cancelled":
                    time.sleep(kinds.uniform(0, 20))
                    client.batches.cancel(batch.id)
        time.sleep(1)


def crowd(soak: Soak, seed: int) -> None:
    """Opens and leaves connections, and asks odd things; no answer may be a mistake of the server."""
    mine, idle = random.Random(seed), []
    upload = b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--XX\r\n'
    upload += b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    form = {"Content-Type": "multipart/form-data; boundary=XX"}
    surrogate = json.dumps({"input_file_id": "\ud800", "endpoint": URL, "metadata": {"a": "\ud800"}}).encode()
    while not soak.is_over:
        try:
            key = {"Authorization": f"Bearer {soak.key}"}
            cases: list[tuple[str, str, bytes, dict[str, str]]] = [
                ("GET", "/v1/batches", b"", key),
                ("GET", "/v1/files?limit=3", b"", key),
                ("GET", "/metrics", b"", key),
                ("GET", "/v1/files", b"", {}),
                ("GET", "/%2e%2e/etc/passwd", b"", key),
                ("GET", "/v1/files?after=x&limit=-1", b"", key),
                ("POST", "/v1/batches", surrogate, key),
                ("POST", "/v1/batches", b"[" * 9999, key),
                ("POST", "/v1/files", b"x" * (3 * MIB), {**key, **form}),
                ("POST", "/v1/files", upload + b"x" * 40 * KIB + b"\r\n--XX--\r\n", {**key, **form}),
                (
                    "POST",
                    "/v1/files",
                    b"\xff" * 999,
                    {**key, "Content-Type": f"{form['Content-Type']}; charset=punycode"},
                ),
                ("GET", "/v1/files", b"", {**key, "Host": "evil.example#@127.0.0.1"}),
                ("DELETE", f"/v1/files/file-{'0' * 24}", b"", key),
            ]
            if len(idle) < soak.connections // THREADS - 1:
                other = socket.create_connection(("127.0.0.1", soak.port), timeout=10)
                idle.append(other)
                head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key['Authorization']}\r\n"
                half = f"{head}Content-Type: {form['Content-Type']}\r\nContent-Length: 99999\r\n\r\n".encode() + upload
                other.sendall(half[: mine.choice([0, 9, len(half)])])
                soak.counts["connections that sent half"] += 1
            elif mine.random() < 0.3:
                idle.pop(mine.randrange(len(idle))).close()
            method, path, body, headers = mine.choice(cases)
            status, answer = soak.ask(method, path, body, **headers)
            if (method, path, status) == ("POST", "/v1/files", 200):
                soak.ask("DELETE", f"/v1/files/{json.loads(answer)['id']}", **key)
            soak.counts[f"answers {status}"] += 1
            if status == 500:
                soak.problems.append("an answer was 500")
        except NO_SERVER as error:
            soak.counts[f"connections without an answer: {type(error).__name__}"] += 1
        time.sleep(mine.uniform(0.1, 0.6))
    for other in idle:
        other.close()


def job_pid(soak: Soak) -> int | None:
    """The process of a job that runs, from its start on."""
    mine = f'output_root="{soak.folder}"'.encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if mine in words and b"jobs.generate" in words:
                return int(process.name)
    return None


@contextmanager
def full_disk(soak: Soak) -> Iterator[None]:
    """No room for anything while it lasts: of the disk, or by a limit on the files of the server and of its job."""
    filler = soak.folder / "filler"
    if soak.is_mounted:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * KIB)
        try:
            yield
        finally:
            filler.unlink()
        return
    pids = [pid for pid in (soak.server.pid if soak.server else None, job_pid(soak)) if pid]
    limits = {}
    for pid in pids:
        with suppress(OSError):
            limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, limits[pid][1]))
    try:
        yield
    finally:
        for pid, limit in limits.items():
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def disturb(soak: Soak) -> None:
    """One thing that goes wrong."""
    if soak.server is None or soak.server.poll() is not None:
        soak.problems.append("the server ended by itself")
        soak.start()
    act = soak.acts.pop(0)
    soak.counts[f"disturbed: {act}"] += 1
    if act == "server":
        soak.kill()
        time.sleep(soak.random.uniform(0, 2))
        soak.start()
    elif act in ("job", "stop job"):
        if (pid := job_pid(soak)) is not None:
            soak.counts["jobs that were signalled"] += 1
            os.kill(pid, signal.SIGKILL if act == "job" else signal.SIGTERM)
    elif act == "disk":
        with full_disk(soak):
            time.sleep(soak.random.uniform(2, 6))
    else:
        for folder, id in (("files", f"file-{soak.random.getrandbits(96):024x}"), ("batches", "batch_" + "0" * 24)):
            odd = soak.random.choice(ODD_RECORDS).replace("ID", id)
            (soak.folder / "serve" / folder / f"{id}.json").write_text(odd)
        soak.kill()
        soak.start()


def check(soak: Soak) -> None:
    """Waits for the batches that are left, and looks at all of them."""
    client = soak.client()
    batches = list(client.batches.list(limit=100))
    deadline = time.monotonic() + SECONDS_EACH * (1 + sum(batch.status not in END for batch in batches))
    while left := [batch for batch in client.batches.list(limit=100) if batch.status not in END]:
        if time.monotonic() > deadline:
            soak.problems += [f"{batch.id} is still {batch.status}" for batch in left]
            break
        time.sleep(1)
    for batch in client.batches.list(limit=100):
        kind = (batch.metadata or {}).get("kind", "?")
        soak.counts[f"{kind} batches {batch.status}"] += 1
        expected_ids = [json.loads(line)["custom_id"] for line in read(client, batch.input_file_id) if line.strip()]
        done = [json.loads(line) for id in (batch.output_file_id, batch.error_file_id) for line in read(client, id)]
        counts = Counter(line["custom_id"] for line in done)
        soak.counts["rows"] += len(done)
        expected = {"empty": ["failed"], "cancelled": ["cancelled", "completed"]}.get(kind, ["completed"])
        if batch.status not in expected:
            soak.problems.append(f"{batch.id} ({kind}) is {batch.status}: {batch.errors}")
        if batch.status == "failed" and not (batch.errors and batch.errors.data and batch.errors.data[0].message):
            soak.problems.append(f"{batch.id} has failed without a reason")
        if max(counts.values(), default=1) > 1 or (
            batch.status == "completed" and sorted(counts) != sorted(expected_ids)
        ):
            soak.problems.append(
                f"{batch.id} ({kind}) has {len(done)} results of {len(expected_ids)} requests: {counts}"
            )
    status, health = soak.ask("GET", "/health")
    if status != 200:
        soak.problems.append(f"/health is {status}: {health!r}")
    files = {path.name for path in (soak.folder / "serve" / "files").iterdir()}
    lost = [name for name in files if name.endswith(".jsonl") and name.replace(".jsonl", ".json") not in files]
    soak.problems += [f"serve/files/{name} was left" for name in files if name.startswith(".")]
    soak.problems += [f"serve/files/{name} has no record" for name in lost]
    running = [run for run in (soak.folder / "generate").glob("batch_*") if is_locked(RunDirectory(path=run).lock)]
    soak.problems += [f"{run.name} is still in work" for run in running]
    log = soak.log.read_text(errors="replace")
    soak.counts["lines of the server's log"] = log.count("\n")
    if "Traceback" in log:
        soak.problems.append(f"a traceback in the log: {log[log.index('Traceback') :][:2000]}")


def read(client: openai.OpenAI, file_id: str | None) -> list[bytes]:
    return client.files.content(file_id).content.splitlines() if file_id else []


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Whether `folder` is a small disk of its own, which only root can make."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def main(*, seconds: int = 600, connections: int = 200, seed: int = 0) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "disk"
        folder.mkdir()
        with small_disk(folder) as is_mounted:
            soak = Soak(folder, seconds, connections, seed, is_mounted)
            soak.start()
            others: list[Callable[[], None]] = [lambda: submit(soak)]
            others += [lambda seed=seed: crowd(soak, seed) for seed in range(THREADS)]
            threads = [threading.Thread(target=other, daemon=True) for other in others]
            for thread in threads:
                thread.start()
            try:
                while not soak.is_over:
                    time.sleep(min(soak.random.uniform(5, 20), max(0.0, soak.end - time.monotonic())))
                    disturb(soak)
                for thread in threads:
                    thread.join(60)
                check(soak)
            finally:
                soak.kill()
                while (pid := job_pid(soak)) is not None:
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(0.2)
            print(f"seed {seed}, {seconds} s, {'a disk' if is_mounted else 'files'} of limited size")
            for what, count in sorted(soak.counts.items()):
                print(f"{count:7,} {what}")
            for problem in soak.problems:
                print("PROBLEM:", problem)
            if soak.problems:
                print(soak.log.read_text(errors="replace")[-6000:])
            return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main(**{key: int(value) for key, _, value in (word.partition("=") for word in sys.argv[1:])}))
