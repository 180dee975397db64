"""Weights that are converted once: whose they are."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.config.settings import ModelConfig, Verify
from runtime.model.loading import LoadedModel, load_model
from runtime.store.checkpoint import open_checkpoint
from tests.support import Reference, flip_outside_samples


@pytest.mark.parametrize(("verify", "num_conversions"), [(Verify.full, 2), (Verify.sampled, 1)])
def test_with_all_bytes_compared_no_file_takes_what_was_converted_of_another(
    verify: Verify, num_conversions: int, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    directory, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(reference("qwen3-moe").directory, directory)

    def load() -> LoadedModel:
        config = ModelConfig(name="test", path=str(directory), verify=verify)
        return load_model(config, torch.device("cpu"), str(cache), use_byte_ranges=False)

    first = load()
    flip_outside_samples(Path(open_checkpoint(directory).files[0]))
    second = load()
    converted = {str(path) for path in cache.glob("*/converted.safetensors")}
    assert len(converted) == num_conversions
    assert first.fingerprint == second.fingerprint
    if verify is Verify.full:
        assert converted & first.digests.keys()
        assert converted & second.digests.keys()
        assert set(open_checkpoint(directory).files) < first.digests.keys()
    else:
        assert not first.digests
