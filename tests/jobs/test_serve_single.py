"""Single requests to the server: its answers are those of `generate`, and whatever ends early leaves nobody waiting.

The process that holds the model is a script in most tests; one test opens a model."""

import asyncio
import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest

from jobs.config.settings import GenerateConfig
from jobs.serving import answers as answers_module
from jobs.serving.config import ServeConfig
from jobs.serving.keeper import Keeper
from jobs.serving.store import BatchStore
from runtime.config.settings import PolicyConfig, PolicyKind, SamplingConfig
from runtime.errors import ConfigError

openai = pytest.importorskip("openai", reason="needs the extra: pip install -e '.[client]'")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra: pip install -e '.[serve]'")
pytest.importorskip("starlette", reason="needs the extra: pip install -e '.[serve]'")

from jobs.serving.answers import AnswerError, Answers  # noqa: E402
from jobs.serving.reply import Reply  # noqa: E402

URL, CHAT = "/v1/completions", "/v1/chat/completions"
Json = dict[str, Any]
# Answers each prompt by itself, in two parts; the prompts "die", "wait" and "bad" are what they say.
SCRIPT = """
    import json, os, signal, sys
    def say(**message):
        print(json.dumps(message), flush=True)
    capacity = json.loads(sys.stdin.readline())["capacity"]
    say(ready={"rows": capacity["num_rows"], "tokens": capacity["num_tokens"]})
    for line in sys.stdin:
        message = json.loads(line)
        if "cancel" in message:
            open("cancelled", "a").write(message["cancel"] + "\\n")
            continue
        prompt, id = message["body"]["prompt"], message["id"]
        if prompt == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "bad":
            say(id=id, error={"status": 400, "message": "body.prompt is bad"})
            continue
        say(**{"pass": {"rows": 3, "tokens": 2, "s": 0.1}})
        if message["streams"]:
            say(id=id, index=0, text=prompt[:1])
        if prompt != "wait":
            choice = {"index": 0, "text": prompt, "rest": prompt[1:], "finish_reason": "stop", "logprobs": None}
            say(id=id, response={"choices": [choice], "usage": {"prompt_tokens": 1}})
"""


class FakeProcess:
    """Starts the script in place of the process that holds the model."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.num_started = 0
        self.script = textwrap.dedent(SCRIPT)
        self._start = asyncio.create_subprocess_exec
        monkeypatch.setattr(answers_module.asyncio, "create_subprocess_exec", self)
        self.folder = folder

    async def __call__(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        assert command[1:4] == ("-P", "-m", "jobs.serving.answering")
        self.num_started += 1
        return await self._start(sys.executable, "-c", self.script, **options)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProcess:
    return FakeProcess(tmp_path, monkeypatch)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    """Has no batches, unless a test adds some."""
    keeper = Keeper(BatchStore(tmp_path), [], tmp_path)
    keeper.start()
    yield keeper
    keeper.stop()
    keeper.join()


async def ask(answers: Answers, prompt: str, *, streams: bool = False) -> list[Json]:
    async with aclosing(answers.messages(URL, {"model": "m", "prompt": prompt}, streams=streams)) as messages:
        return [message async for message in messages]


def run(tmp_path: Path, keeper: Keeper, work: Callable[[Answers], Any], **settings: Any) -> Answers:
    """Runs `work` in an event loop, within a minute."""
    answers = Answers(ServeConfig(**settings), GenerateConfig(), tmp_path, keeper)

    async def main() -> None:
        try:
            async with asyncio.timeout(60):
                await work(answers)
        finally:
            answers.stop()
            await asyncio.sleep(0.05)

    asyncio.run(main())
    return answers


@pytest.mark.usefixtures("fake")
def test_requests_are_answered_by_one_process(tmp_path: Path, keeper: Keeper, fake: FakeProcess) -> None:
    async def work(answers: Answers) -> None:
        found = await asyncio.gather(*(ask(answers, f"hi {number}") for number in range(20)))
        texts = [messages[-1]["response"]["choices"][0]["text"] for messages in found]
        assert texts == [f"hi {number}" for number in range(20)]
        [part, last] = await ask(answers, "stream", streams=True)
        assert (part["text"], last["response"]["choices"][0]["rest"]) == ("s", "tream")
        assert (answers.num_pass_rows, answers.num_waiting) == (3, 0)

    answers = run(tmp_path, keeper, work)
    assert fake.num_started == 1
    assert (answers.counts["answered"], answers.num_pass_rows) == (21, 0)


@pytest.mark.usefixtures("fake")
def test_too_many_requests_and_bad_ones_are_refused_alone(tmp_path: Path, keeper: Keeper) -> None:
    async def work(answers: Answers) -> None:
        with pytest.raises(AnswerError, match="is bad") as bad:
            await ask(answers, "bad")
        waiting = [asyncio.create_task(ask(answers, "wait")) for _ in range(2)]
        while answers.num_waiting < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(AnswerError, match="max_requests=2 requests are in progress") as refused:
            await ask(answers, "hi")
        assert (bad.value.status, refused.value.status) == (400, 429)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (await ask(answers, "hi"))[-1]["response"]
        assert len((tmp_path / "cancelled").read_text().split()) == 2

    answers = run(tmp_path, keeper, work, max_requests=2)
    assert (answers.counts["rejected"], answers.counts["cancelled"]) == (2, 2)


@pytest.mark.usefixtures("fake")
def test_a_killed_process_fails_its_requests_and_the_next_starts_another(
    tmp_path: Path, keeper: Keeper, fake: FakeProcess
) -> None:
    async def work(answers: Answers) -> None:
        waiting = asyncio.create_task(ask(answers, "wait", streams=True))
        while answers.counts["passes"] < 1:
            await asyncio.sleep(0.01)
        with pytest.raises(AnswerError, match=r"the model's process has ended \(signal 9\)") as ended:
            await ask(answers, "die")
        with pytest.raises(AnswerError, match="has ended"):
            await waiting
        assert ended.value.status == 503
        assert (await ask(answers, "hi"))[-1]["response"]

    run(tmp_path, keeper, work)
    assert fake.num_started == 2


def test_a_model_that_cannot_be_opened_says_why(tmp_path: Path, keeper: Keeper, fake: FakeProcess) -> None:
    fake.script = "import sys; sys.exit('error: model.path is not set')"

    async def work(answers: Answers) -> None:
        found = await asyncio.gather(*(ask(answers, "hi") for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in found] == ["the model cannot be opened: model.path is not set"] * 3
        assert not keeper.has_yielded

    run(tmp_path, keeper, work)
    assert fake.num_started == 1


def test_a_client_that_leaves_does_not_end_the_opening_for_others(
    tmp_path: Path, keeper: Keeper, fake: FakeProcess
) -> None:
    fake.script = "import time; time.sleep(0.5)\n" + fake.script

    async def work(answers: Answers) -> None:
        first = asyncio.create_task(ask(answers, "hi"))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(ask(answers, "you"))
        await asyncio.sleep(0.1)
        first.cancel()
        assert (await second)[-1]["response"]["choices"][0]["text"] == "you"

    run(tmp_path, keeper, work)
    assert fake.num_started == 1


class BusyKeeper(Keeper):
    """Has a batch that runs until it is claimed, and again after the release."""

    def __init__(self, folder: Path):
        super().__init__(BatchStore(folder), [], folder)
        self.log: list[str] = []

    def _step(self) -> float | None:
        claimed = self._is_claimed.is_set()
        state = "yields" if claimed else "runs"
        if self.log[-1:] != [state]:
            self.log.append(state)
        if claimed:
            self._has_yielded.set()
        return 0.02

    @property
    def has_work(self) -> bool:
        return True


@pytest.mark.usefixtures("fake")
def test_batches_and_single_requests_take_turns(
    tmp_path: Path, fake: FakeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    fake.script += "os.close(1)\nimport time\ntime.sleep(0.2)\nopen('ended', 'a').write('whole ')\n"
    keeper = BusyKeeper(tmp_path)
    keeper.start()

    async def work(answers: Answers) -> None:
        for _ in range(2):
            assert (await ask(answers, "hi"))[-1]["response"]
            while keeper.log[-1] != "runs":
                await asyncio.sleep(0.02)

    run(tmp_path, keeper, work, idle_seconds=0.1)
    keeper.stop()
    keeper.join()
    assert (fake.num_started, keeper.log.count("yields")) == (2, 2)
    assert (tmp_path / "ended").read_text() == "whole whole "  # a process that is closed is not killed
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def _messages(*messages: Json, error: AnswerError | None = None) -> AsyncGenerator[Json]:
    for message in messages:
        yield message
    if error is not None:
        raise error


def events(url: str, first: Json, *rest: Json, error: AnswerError | None = None, has_usage: bool = False) -> list[Json]:
    async def collect() -> list[str]:
        reply = Reply(url=url, model="m", id="x", created=7)
        return [event async for event in reply.events(first, _messages(*rest, error=error), has_usage=has_usage)]

    texts = [event.removeprefix("data: ").removesuffix("\n\n") for event in asyncio.run(collect())]
    return [{"done": True} if text == "[DONE]" else json.loads(text) for text in texts]


DONE = {"choices": [{"index": 0, "rest": "c", "finish_reason": "stop"}], "usage": {"total_tokens": 5}}


def test_events_of_a_chat_begin_with_its_role_and_end_with_the_reason_and_usage() -> None:
    found = events(CHAT, {"index": 0, "text": "a"}, {"index": 0, "text": "b"}, {"response": DONE}, has_usage=True)
    deltas = [event["choices"][0] for event in found[:-2]]
    assert [choice["delta"] for choice in deltas] == [
        {"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {"content": "c"}, {},
    ]  # fmt: skip
    assert [choice["finish_reason"] for choice in deltas] == [None, None, None, None, "stop"]
    assert (found[-2]["choices"], found[-2]["usage"], found[-1]) == ([], {"total_tokens": 5}, {"done": True})
    assert {(event["id"], event["object"], event["created"]) for event in found[:-1]} == {
        ("chatcmpl-x", "chat.completion.chunk", 7)
    }


def test_an_error_amid_events_is_the_last_one() -> None:
    found = events(URL, {"index": 0, "text": "a"}, error=AnswerError(503, "gone"))
    assert [event.get("error", {}).get("message") for event in found] == [None, "gone"]


@pytest.mark.parametrize("settings", [{"max_rows": 0}, {"max_requests": 0}, {"idle_seconds": -1.0}])
def test_limits_are_checked(settings: Json) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServeConfig(**settings)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator["openai.OpenAI"]:
    """A client of a server that opens the bundled model."""
    from jobs.serving.app import make_app
    from jobs.serving.server import _Connection
    from tests.jobs.test_serve import KEY, client_of, free_port, wait_for

    folder = tmp_path_factory.mktemp("single")
    config = ServeConfig(
        port=free_port(),
        output_root=str(folder),
        max_rows=8,
        max_request_tokens=256,
    )
    job = GenerateConfig(
        sampling=SamplingConfig(max_new_tokens=32, logprobs=2),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=8),
    )
    keeper = Keeper(BatchStore(folder), [], folder)
    keeper.start()
    answers = Answers(config, job, folder, keeper)
    app = make_app(config, BatchStore(folder), keeper, answers, KEY, ["tiny"])
    server = uvicorn.Server(uvicorn.Config(app, port=config.port, http=_Connection, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    with closing(client_of(config.port)) as client:
        yield client
    answers.stop()
    server.should_exit = True
    thread.join()
    keeper.stop()


PROMPTS = ["Q: Spell the word old.\nA:", "Q: What is 2 + 3?\nA:", "Once upon a time", "Q: Repeat: red, blue\nA:"]


def test_answers_equal_those_of_generate(served: "openai.OpenAI") -> None:
    """Whole and streamed, alone and several in a request, sampled with a seed, stopped, with log-probabilities."""
    from runtime import Prompt, Runtime

    options: list[Json] = [{}, {"stop": [" "]}, {"seed": 5, "temperature": 0.9, "n": 2}]
    expected = []
    for option in options:
        with Runtime(model="tiny", max_new_tokens=12) as runtime:
            given = {key: value for key, value in option.items() if key != "n"}
            prompts = [Prompt(text, **given) for text in PROMPTS]
            expected.append([result.text for result in runtime.generate(prompts)])
    create = served.completions.create
    for option, texts in zip(options, expected, strict=True):
        for number, prompt in enumerate(PROMPTS):
            whole = create(model="tiny", prompt=prompt, max_tokens=12, **option)
            assert whole.choices[0].text == texts[number]
            parts: dict[int, str] = {}
            for event in create(model="tiny", prompt=prompt, max_tokens=12, stream=True, **option):
                for choice in event.choices:
                    parts[choice.index] = parts.get(choice.index, "") + choice.text
            assert parts == {choice.index: choice.text for choice in whole.choices}
    messages = [{"role": "user", "content": "Spell the word brown."}]
    with Runtime(model="tiny", max_new_tokens=12) as runtime:
        [chat] = runtime.generate([Prompt(messages=messages)])
    chats = served.chat.completions
    assert chats.create(model="tiny", messages=messages, max_tokens=12).choices[0].message.content == chat.text
    chunks = chats.create(model="tiny", messages=messages, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.text
    together = create(model="tiny", prompt=PROMPTS, max_tokens=12)
    assert [(choice.index, choice.text) for choice in together.choices] == [*enumerate(expected[0])]
    assert together.usage.completion_tokens > 4
    scored = create(model="tiny", prompt=PROMPTS[0], max_tokens=3, logprobs=2)
    assert len(scored.choices[0].logprobs.token_logprobs) == 3
    for fields, message in (
        ({"logprobs": 3}, "start it with sampling.logprobs=3"),
        ({"max_tokens": 1000}, "together above the server's max_request_tokens=256"),
        ({"echo": True}, "body.echo='True' is not supported"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            create(model="tiny", prompt="hi", **fields)


def test_many_requests_at_once_share_passes_and_a_kill_leaves_nobody_waiting(served: "openai.OpenAI") -> None:
    results: list[object] = []

    def request(number: int) -> None:
        try:
            results.append(served.completions.create(model="tiny", prompt=f"{number} + 1 =", max_tokens=100))
        except openai.APIError as error:
            results.append(error)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not any(isinstance(result, openai.types.Completion) for result in results):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    metrics = served._client.get("../metrics", headers={"Authorization": f"Bearer {served.api_key}"}).text
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in metrics.splitlines() if line[0] != "#"}
    assert values["weightstream_rows_of_passes"] > values["weightstream_passes"] > 0
    [pid] = [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if b"jobs.serving.answering" in _command(path) and _parent(path) == os.getpid()
    ]
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(results) == 24
    assert all(isinstance(result, openai.types.Completion | openai.InternalServerError) for result in results)


def _command(path: Path) -> bytes:
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""


def _parent(path: Path) -> int:
    return int((path / "stat").read_text().rpartition(")")[2].split()[1])
