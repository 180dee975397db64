"""`jobs.encode`: a row for each prompt, the same as the library's, however often the run was stopped."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
)

from jobs.config.settings import EncodeConfig, load, run_directory
from jobs.run.tasks.encode import encode
from runtime import Runtime
from runtime.errors import ConfigError, Interrupted
from tests.runtime.encoding_support import checkpoints

CONF = Path(__file__).resolve().parents[2] / "conf"
TEXTS = [" ".join(["here", "[MASK]", "there"] * length) for length in (1, 4, 2, 3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type], Path]:
    make = checkpoints(tmp_path_factory)
    return cache(lambda auto: make("bert", auto))


def config_for(folder: Path, *words: str, texts: Sequence[object] | None = None) -> EncodeConfig:
    folder.mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    rows = [{"id": str(i), "prompt": text} for i, text in enumerate(TEXTS if texts is None else texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = ["dataset=jsonl", f"dataset.path={path}", "dataset.id_field=id", f"output_root={folder}", "run=mine"]
    fixed = ["policy=fixed", "policy.micro_batch_size=1", "policy.num_micro_batches=2", "offload=nvme"]
    with initialize_config_dir(str(CONF), version_base=None):
        return load(EncodeConfig, compose("encode", overrides=[*settings, *fixed, *words]))


def never() -> bool:
    return False


def rows_of(config: EncodeConfig) -> list[dict[str, object]]:
    rows = pq.read_table(run_directory(config) / "generations").to_pylist()
    return sorted(rows, key=lambda row: row["row_index"])


def test_embeddings_are_those_of_the_library_and_a_bad_row_is_an_error_row(tmp_path: Path) -> None:
    words = ("model=random", "encode.pooling=mean", "encode.normalize=true")
    config = config_for(tmp_path, *words, texts=[*TEXTS, 4])
    outcome = encode(config, never)
    *good, bad = rows_of(config)
    expected = Runtime(config.runtime).embed(TEXTS, pooling="mean", normalize=True)
    assert outcome.exit_code == 3
    assert len(good) == len(expected)
    for row, each in zip(good, expected, strict=True):
        assert row["embedding"] == pytest.approx(each.vector.tolist(), abs=1e-5)
        assert row["num_prompt_tokens"] == each.num_prompt_tokens
    assert bad["embedding"] is None
    assert bad["status"] == "error"
    assert bad["error"]


def test_the_job_reads_the_encoder_of_an_encoder_decoder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = checkpoints(tmp_path_factory)("t5", AutoModelForSeq2SeqLM)
    config = config_for(tmp_path, "model=hf", f"model.path={path}", "model.dtype=float32")
    assert encode(config, never).exit_code == 0
    model, runtime = AutoModelForTextEncoding.from_pretrained(path).eval(), Runtime(config.runtime, encodes=True)
    for row, ids in zip(rows_of(config), runtime.tokenize(TEXTS), strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids]))[0][0].mean(0)
        assert row["embedding"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_classes_come_likeliest_first(tmp_path: Path, checkpoint: Callable[[type], Path]) -> None:
    path = checkpoint(AutoModelForSequenceClassification)
    model = ("model=hf", f"model.path={path}", "model.dtype=float32")
    config = config_for(tmp_path, *model, "encode.output=classes", "encode.num_top=2")
    assert encode(config, never).exit_code == 0
    for row, each in zip(rows_of(config), Runtime(config.runtime).classify(TEXTS), strict=True):
        assert row["label"] == each.label
        assert row["logits"] == pytest.approx(sorted(each.logits, reverse=True)[:2], abs=1e-5)
        assert row["probabilities"] == pytest.approx(sorted(each.probabilities, reverse=True)[:2], abs=1e-5)


def test_masks_are_filled_and_other_classes_refused(tmp_path: Path, checkpoint: Callable[[type], Path]) -> None:
    path = checkpoint(AutoModelForMaskedLM)
    model = ("model=hf", f"model.path={path}", "model.dtype=float32")
    config = config_for(tmp_path, *model, "encode.output=masks", "encode.num_top=3", texts=[*TEXTS, "here"])
    assert encode(config, never).exit_code == 3
    *good, bad = rows_of(config)
    for row, each in zip(good, Runtime(config.runtime).fill_masks(TEXTS, num_top=3), strict=True):
        assert row["mask_token_ids"] == [list(ids) for ids in each.token_ids]
        assert row["filled_text"] == each.text
    assert "no mask" in str(bad["error"])
    other = config_for(tmp_path / "other", *model, "encode.output=classes")
    with pytest.raises(ConfigError, match="has no classes"):
        encode(other, never)
    assert not run_directory(other).exists()


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("chunk_tokens", ["16", "null"])
def test_a_run_that_is_stopped_comes_to_the_bits_of_one_that_was_not(chunk_tokens: str, tmp_path: Path) -> None:
    words = ("model=random", f"policy.prefill_chunk_tokens={chunk_tokens}")
    whole, stopped = (config_for(tmp_path / name, *words) for name in ("whole", "stopped"))
    encode(whole, never)
    folder = run_directory(stopped) / "generations"
    with pytest.raises(Interrupted):
        encode(stopped, lambda: any(folder.glob("*.parquet")))
    num_parts = len(list(folder.glob("*.parquet")))
    encode(stopped, never)
    assert 0 < num_parts < len(list(folder.glob("*.parquet")))
    for row, expected in zip(rows_of(stopped), rows_of(whole), strict=True):
        assert row == expected


@pytest.mark.parametrize(
    "words",
    [["sampling.n=2"], ["encode.num_top=0"], ["encode.output=masks", "encode.pooling=cls"]],
)
def test_settings_that_mean_nothing_here_are_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words[-1].partition("=")[0]):
        config_for(tmp_path, *words)


def test_defaults_of_yaml_and_code_are_the_same() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        assert load(EncodeConfig, compose("encode")) == EncodeConfig()
