"""OpenAI's batch files that generate nothing: embeddings and scores are those of the library, and a line that asks for
what is not there is an error of its own.
"""

import json
import shutil
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from jobs.config.settings import EncodeConfig, EncodeSettings, GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind, read_rows
from jobs.datasets.rows import EncodeInputs
from jobs.exporting.export import write_batch_files
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.encode import encode
from jobs.run.tasks.generate import generate
from runtime import Prompt, Runtime
from runtime.config.settings import DType, ModelConfig, PolicyConfig, PolicyKind, Pooling, Readout
from runtime.errors import ConfigError, DatasetError
from tests.jobs.kill_support import Kills
from tests.jobs.test_openai_batch import line, read, written
from tests.runtime.encoding_support import Checkpoints, checkpoints, saved

EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"


def asked(custom_id: str, url: str = EMBEDDINGS, **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


def dataset(folder: Path, *lines: object) -> DatasetConfig:
    folder.mkdir(parents=True, exist_ok=True)
    return DatasetConfig(kind=DatasetKind["openai_batch"], path=written(folder / "in.jsonl", list(lines)))


def config_of(folder: Path, *lines: object, model: ModelConfig | None = None, **encoded: object) -> EncodeConfig:
    return EncodeConfig(
        run="batch",
        output_root=str(folder),
        model=model or ModelConfig(name="random"),
        dataset=dataset(folder, *lines),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2),
        encode=EncodeSettings(**encoded),  # pyright: ignore[reportArgumentType]
    )


def results(config: EncodeConfig) -> tuple[list[dict], list[dict]]:
    outcome = encode(config, lambda: False)
    write_batch_files(outcome.directory)
    return read(outcome.directory / "output.jsonl"), read(outcome.directory / "errors.jsonl")


@pytest.mark.parametrize(
    ("url", "body", "inputs"),
    [
        (EMBEDDINGS, {"input": "Hi"}, EncodeInputs(texts=("Hi",))),
        (EMBEDDINGS, {"input": ["Hi", "Ho"], "encoding_format": "base64"}, EncodeInputs(texts=("Hi", "Ho"))),
        (EMBEDDINGS, {"input": [1, 2], "user": "me", "dimensions": None}, EncodeInputs(texts=((1, 2),))),
        (EMBEDDINGS, {"input": [[1, 2], [3]], "normalize": True}, EncodeInputs(texts=((1, 2), (3,)))),
        (SCORE, {"text_1": "a", "text_2": "b"}, EncodeInputs(texts=("a",), second_texts=("b",))),
        ("/score", {"text_1": ["a"], "text_2": ["b", "c"]}, EncodeInputs(texts=("a",), second_texts=("b", "c"))),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d"]}, EncodeInputs(texts=("a", "b"), second_texts=("c", "d"))),
    ],
)  # fmt: skip
def test_what_a_body_has_encoded(url: str, body: dict[str, object], inputs: EncodeInputs, tmp_path: Path) -> None:
    (row,) = read_rows(dataset(tmp_path, asked("a", url, **body)), encodes=True)
    assert (row.error, row.inputs) == (None, inputs)


@pytest.mark.parametrize(
    ("url", "body", "why"),
    [
        (EMBEDDINGS, {}, r"body\.input is null, not text"),
        (EMBEDDINGS, {"input": ""}, r"body\.input is empty"),
        (EMBEDDINGS, {"input": []}, r"body\.input is neither a text nor a list of token ids"),
        (EMBEDDINGS, {"input": ["Hi", 3]}, r"input 1 of body\.input is a number"),
        (EMBEDDINGS, {"input": [1, "Hi"]}, r"body\.input is neither a text nor"),
        (EMBEDDINGS, {"input": [[1], [True]]}, r"input 1 of body\.input is neither"),
        (EMBEDDINGS, {"input": "Hi", "dimensions": 64}, r"body\.dimensions is not supported: vectors have"),
        (EMBEDDINGS, {"input": "Hi", "encoding_format": "int8"}, r"body\.encoding_format must be float or base64"),
        (EMBEDDINGS, {"input": "Hi", "normalize": False}, r"body\.normalize='False' is not supported"),
        (EMBEDDINGS, {"input": "Hi", "temperature": 1}, r"body\.temperature is not supported"),
        (EMBEDDINGS, {"input": "Hi", "model": None}, r"body\.model is null"),
        (SCORE, {"text_1": "a"}, r"body\.text_2 is null, not text"),
        (SCORE, {"text_1": "a", "text_2": []}, r"body\.text_2 is an empty list"),
        (
            SCORE,
            {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]},
            r"body\.text_1 has 2 texts and body\.text_2 3: text_1",
        ),
        (SCORE, {"text_1": {"content": []}, "text_2": "b"}, r"body\.text_1 is an object, not text"),
    ],
)
def test_what_cannot_be_encoded_is_an_error_of_its_line(
    url: str, body: dict[str, object], why: str, tmp_path: Path
) -> None:
    bad, good = read_rows(dataset(tmp_path, asked("a", url, **body), asked("b", input="Hi")), encodes=True)
    assert good.error is None
    with pytest.raises(ValueError, match=rf"^in\.jsonl, line 1, byte 0: {why}"):
        raise ValueError(bad.error)


def test_vectors_are_those_of_the_library_in_openais_own_types(tmp_path: Path) -> None:
    texts = ["All happy families", "are alike.", "Every unhappy family"]
    config = config_of(
        tmp_path,
        asked("many", input=texts),
        asked("one", input=texts[0], encoding_format="base64"),
        asked("tokens", input=[[5, 6, 7], [8]]),
        asked("far", input=[5, 10**9]),
        asked("bad", input=[]),
        pooling=Pooling.mean,
    )
    done, failed = results(config)
    many, one, tokens = (result["response"]["body"] for result in done)
    with Runtime(config.runtime) as runtime:
        prompts = [*map(Prompt, texts), Prompt(token_ids=[5, 6, 7]), Prompt(token_ids=[8])]
        expected = runtime.embed(prompts, pooling="mean", normalize=True)
    found = [each["embedding"] for body in (many, tokens) for each in body["data"]]
    assert [each["index"] for each in many["data"]] == [0, 1, 2]
    assert many["usage"]["prompt_tokens"] == sum(each.num_prompt_tokens for each in expected[:3])
    np.testing.assert_allclose(found, [each.vector for each in expected], atol=1e-6)
    packed = np.frombuffer(b64decode(one["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(packed, expected[0].vector, atol=1e-6)
    assert [line["custom_id"] for line in failed] == ["far", "bad"]
    assert "token id 1000000000 is outside the model's vocabulary" in failed[0]["error"]["message"]
    types = pytest.importorskip("openai.types", reason="needs the extra: pip install -e '.[client]'")
    for body in (many, tokens):
        assert types.CreateEmbeddingResponse.model_validate(body, strict=True).to_dict() == body


def test_a_score_is_the_cosine_of_two_vectors(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        asked("with each", SCORE, text_1="a dog", text_2=["a cat", "a dog"]),
        asked("in pairs", "/score", text_1=["a dog", "a"], text_2=["a cat", "no"]),
    )
    (each, pairs), failed = results(config)
    assert failed == []
    with Runtime(config.runtime) as runtime:
        dog, cat, a, no = (found.vector for found in runtime.embed(["a dog", "a cat", "a", "no"], normalize=True))
    scores = [one["score"] for result in (each, pairs) for one in result["response"]["body"]["data"]]
    np.testing.assert_allclose(scores, [dog @ cat, 1, dog @ cat, a @ no], atol=1e-6)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return checkpoints(tmp_path_factory)


def ranker(make: Checkpoints, folder: Path, *, has_types: bool) -> ModelConfig:
    """A checkpoint with one class. `has_types`: its tokenizer gives each text of a pair token types of its own."""
    config = AutoConfig.from_pretrained(make("bert", AutoModelForSequenceClassification))
    config.num_labels = 1
    path = saved(AutoModelForSequenceClassification.from_config(config), folder)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if has_types else [])]
    AutoTokenizer.from_pretrained(path, model_input_names=names).save_pretrained(path)
    return ModelConfig(name="hf", path=str(path), dtype=DType.float32)


def test_a_rankers_score_is_that_of_transformers_and_a_classifier_has_none(make: Checkpoints, tmp_path: Path) -> None:
    one = ranker(make, tmp_path / "ranker", has_types=False)
    lines = [asked("a", SCORE, text_1="here", text_2=["there here", "there"]), asked("b", input="here")]
    (scored,), (embedded,) = results(config_of(tmp_path / "one", *lines, model=one, output=Readout.classes))
    tokenizer = AutoTokenizer.from_pretrained(one.path)
    model = AutoModelForSequenceClassification.from_pretrained(one.path).eval()
    with torch.no_grad():
        pairs = [tokenizer("here", text, return_tensors="pt") for text in ("there here", "there")]
        expected = [torch.sigmoid(model(**pair).logits).item() for pair in pairs]
    body = scored["response"]["body"]
    assert [each["score"] for each in body["data"]] == pytest.approx(expected, abs=1e-5)
    assert (body["object"], body["data"][1]["index"], body["usage"]["total_tokens"]) == ("list", 1, 5)
    assert "encode.output=classes gives no embeddings" in embedded["error"]["message"]
    typed = ranker(make, tmp_path / "typed", has_types=True)
    done, failed = results(config_of(tmp_path / "three", *lines, model=typed, output=Readout.classes))
    assert done == []
    assert "needs token types for the two texts of a pair" in failed[0]["error"]["message"]
    classes = ModelConfig(name="hf", path=str(make("bert", AutoModelForSequenceClassification)), dtype=DType.float32)
    done, failed = results(config_of(tmp_path / "two", *lines, model=classes, output=Readout.classes))
    assert done == []
    assert "scores need a reranker with one class, and this model has 3" in failed[0]["error"]["message"]


def test_lines_for_the_other_job_are_errors_and_a_file_of_nothing_else_is_refused(tmp_path: Path) -> None:
    both = [asked("a", input="Hi"), line("b")]
    encoded, generated = (read_rows(dataset(tmp_path, *both), encodes=encodes) for encodes in (True, False))
    assert [row.error is None for row in encoded] == [True, False]
    assert [row.error is None for row in generated] == [False, True]
    assert "weightstream generate, in a separate run" in str(encoded[1].error)
    assert "/v1/score and /score need weightstream encode" in str(generated[0].error)
    with pytest.raises(DatasetError, match=r"to /v1/embeddings .*: use weightstream encode"):
        generate(GenerateConfig(dataset=dataset(tmp_path, both[0]), output_root=str(tmp_path)), lambda: False)
    with pytest.raises(DatasetError, match=r"to /v1/chat/completions .*: use weightstream generate"):
        encode(config_of(tmp_path, both[1]), lambda: False)
    with pytest.raises(ConfigError, match=r"encode\.output=masks does not support dataset=openai_batch"):
        config_of(tmp_path, both[0], output=Readout.masks)


@pytest.mark.slow("jobs/test_openai_batch.py::test_a_kill_changes_no_byte_of_the_results")
@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("most", [6, 9])
def test_a_kill_changes_no_byte_of_the_results(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(["word"] * length) for length in (1, 9, 4, 30, 2, 17)]
    lines: list = [asked(f"r{n}", input=texts[: 1 + n % 6]) for n in range(9)]
    lines += [asked("s", SCORE, text_1="a", text_2=texts), line("t"), "{nonsense"]
    whole = encode(config_of(tmp_path / "whole", *lines), lambda: False).directory
    write_batch_files(whole)
    first = config_of(tmp_path / "first", *lines)
    run = tmp_path / "first" / "encode" / "batch"
    run.mkdir(parents=True)
    kills = Kills(monkeypatch)
    with kills.copied(run, tmp_path / "killed", most=most) as copies:
        encode(first, lambda: False)
    assert not (copies[-1] / "_SUCCESS.json").exists()
    shutil.copytree(copies[-1], tmp_path / "again" / "encode" / "batch")
    again = encode(config_of(tmp_path / "again", *lines), lambda: False).directory
    write_batch_files(again)
    for name in ("batch_output", "batch_errors"):
        found, expected = (getattr(RunDirectory(path=path), name).read_bytes() for path in (again, whole))
        assert found == expected
    assert {json.loads(text)["custom_id"] for text in (again / "errors.jsonl").read_text().splitlines()} == {"t", None}
