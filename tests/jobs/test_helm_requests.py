"""HELM's dry runs as rows, and the client that gives HELM their answers; crfm-helm itself is not installed here, so its
two modules are doubles with the names and fields of 0.5.16."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.datasets import DatasetConfig, DatasetKind, Row, read_rows
from jobs.datasets.helm import request_digest
from runtime.errors import DatasetError

ASKED = {
    **{"model_deployment": "huggingface/a", "model": "a/a", "embedding": False, "prompt": "one plus one is"},
    **{"temperature": 0.0, "num_completions": 2, "top_k_per_token": 1, "max_tokens": 7, "stop_sequences": ["\n"]},
    **{"echo_prompt": False, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0},
}


@dataclass(frozen=True)
class AskedOfClient:
    """HELM's `Request`."""

    model_deployment: str = ""
    model: str = ""
    embedding: bool = False
    prompt: str = ""
    temperature: float = 1.0
    num_completions: int = 1
    top_k_per_token: int = 1
    max_tokens: int = 100
    stop_sequences: list[str] = field(default_factory=list)
    echo_prompt: bool = False
    top_p: float = 1
    presence_penalty: float = 0
    frequency_penalty: float = 0
    random: str | None = None
    messages: list[dict[str, str]] | None = None
    multimodal_prompt: object = None
    image_generation_parameters: object = None
    response_format: object = None


def state(**request: object) -> dict[str, Any]:
    """A request of a dry run, with the instance that it is made of."""
    references = [{"output": {"text": "3"}, "tags": []}, {"output": {"text": "2"}, "tags": ["correct"]}]
    instance = {"input": {"text": "1 + 1"}, "references": references, "split": "valid", "id": "id7"}
    return {"instance": instance, "train_trial_index": 0, "request": {**ASKED, **request}, "num_train_instances": 0}


def rows_of(folder: Path, *states: dict[str, Any], **settings: Any) -> list[Row]:
    (folder / "addition").mkdir(exist_ok=True)
    (folder / "addition" / "scenario_state.json").write_text(json.dumps({"request_states": list(states)}))
    return read_rows(DatasetConfig(kind=DatasetKind["helm"], path=str(folder), **settings))


def test_a_request_is_a_row_that_asks_the_same(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, state())
    asked = row.overrides
    assert (row.prompt, row.messages, row.error) == ("one plus one is", None, None)
    assert (asked.max_new_tokens, asked.temperature, asked.top_p, asked.stop, asked.n) == (7, 0.0, 1, ["\n"], 2)
    assert row.columns == {"helm_run": "addition", "instance_id": "id7", "split": "valid", "reference": "2"}


def test_what_asks_the_same_is_one_row_whatever_model_is_named(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, state(), state(model="b/b", temperature=0), state(random="1"), state(prompt="two"))
    assert [row.prompt for row in rows] == ["one plus one is", "one plus one is", "two"]
    assert len({row.id for row in rows}) == 3
    assert [row.index for row in rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo_prompt", True),
        ("embedding", True),
        ("presence_penalty", 0.5),
        ("max_tokens", 0),
        ("max_tokens", 10**400),
        ("temperature", 10**400),
        ("num_completions", True),
        ("num_completions", 10**8),
        ("stop_sequences", "x"),
        ("messages", [{"role": "user", "content": "x"}]),
        ("multimodal_prompt", {"media_objects": []}),
    ],
)
def test_what_cannot_be_honoured_is_an_error_row_that_names_the_field(
    tmp_path: Path, field: str, value: object
) -> None:
    bad, good = rows_of(tmp_path, state(**{field: value}), state())
    assert bad.error is not None
    assert f"request.{field}" in bad.error
    assert good.error is None


def test_messages_are_a_chat_where_the_run_has_a_template(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "x"}]
    (row,) = rows_of(tmp_path, state(messages=said, prompt=""), chat_template=True)
    assert row.messages == said


def test_a_directory_without_a_dry_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="helm-run --dry-run"):
        read_rows(DatasetConfig(kind=DatasetKind["helm"], path=str(tmp_path)))


def test_a_request_has_the_digest_of_what_its_dry_run_wrote() -> None:
    assert request_digest(asdict(AskedOfClient(**ASKED))) == request_digest(ASKED)
    for key in ASKED.keys() - {"model", "model_deployment"}:
        assert request_digest({**ASKED, key: "other"}) != request_digest(ASKED)


@pytest.fixture
def helm_client(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def plain(name: str) -> type:
        return type(name, (), {"__init__": lambda self, **values: vars(self).update(values)})

    client, request = ModuleType("helm.clients.client"), ModuleType("helm.common.request")
    vars(client)["Client"] = type("Client", (), {})
    for name in ("ErrorFlags", "GeneratedOutput", "Request", "RequestResult", "Token"):
        vars(request)[name] = plain(name)
    for name, module in {"helm.clients.client": client, "helm.common.request": request}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for package in ("helm", "helm.clients", "helm.common"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.delitem(sys.modules, "jobs.evaluating.helm_client", raising=False)
    from jobs.evaluating import helm_client

    return helm_client


def write_run(folder: Path) -> Path:
    """A finished run that has two completions of `ASKED`, the second first, and an error."""
    common = {"token_ids": [5, 6], "logprobs": [-0.5, -0.25], "finish_reason": "eos", "error": None}
    rows = [
        {"id": request_digest(ASKED), "sample_index": 1, "completion": " two", **common, "finish_reason": "length"},
        {"id": request_digest(ASKED), "sample_index": 0, "completion": " 2", **common},
        {"id": request_digest({**ASKED, "prompt": "bad"}), "sample_index": 0, "completion": "", **common}
        | {"token_ids": [], "logprobs": [], "finish_reason": "", "error": "too long"},
    ]
    (folder / "generations").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "generations" / "part-0.parquet")
    (folder / "_SUCCESS.json").write_text("{}")
    return folder


def test_the_client_gives_a_runs_completions_with_a_token_for_each(tmp_path: Path, helm_client: ModuleType) -> None:
    client = helm_client.RunClient(run=str(write_run(tmp_path / "run")), cache_config=None)
    result = client.make_request(AskedOfClient(**{**ASKED, "model": "mine/tiny"}))
    assert result.success
    assert [each.text for each in result.completions] == [" 2", " two"]
    assert [each.finish_reason for each in result.completions] == [{"reason": "stop"}, {"reason": "length"}]
    assert [(token.text, token.logprob) for token in result.completions[0].tokens] == [(" 2", -0.5), ("", -0.25)]
    assert result.completions[0].logprob == -0.75


def test_what_a_run_does_not_answer_ends_helms_run(tmp_path: Path, helm_client: ModuleType) -> None:
    client = helm_client.RunClient(run=str(write_run(tmp_path / "run")))
    for prompt, why in {"bad": "too long", "new": "no such request"}.items():
        result = client.make_request(AskedOfClient(**{**ASKED, "prompt": prompt}))
        assert not result.success
        assert why in result.error
        assert result.error_flags.is_fatal


def test_a_run_that_is_not_finished_is_no_client(tmp_path: Path, helm_client: ModuleType) -> None:
    (write_run(tmp_path / "run") / "_SUCCESS.json").unlink()
    for name, why in {"run": "not finished", "other": "does not exist"}.items():
        with pytest.raises(ValueError, match=why):
            helm_client.RunClient(run=str(tmp_path / name))
