"""A file whose tensors begin between two elements: a CPU copies one stage of it at a time, and counts that."""

from pathlib import Path

import pytest

from runtime import ModelConfig, OffloadConfig, Runtime, RuntimeConfig
from runtime.config.settings import SamplingConfig, Tier
from runtime.engine.engine import Engine
from runtime.events import Weights
from runtime.sequences.sequence import Request
from tests.runtime.test_moves import shift
from tests.support import synthesize

PROMPTS = [[5, 6, 7], [9] * 20]


def opened(directory: Path, tier: Tier) -> Runtime:
    config = RuntimeConfig(
        model=ModelConfig(name="test", path=str(directory)),
        offload=OffloadConfig(tier=tier, resident_layers=None if tier is Tier.none else 0),
        sampling=SamplingConfig(max_new_tokens=3),
    )
    return Runtime(config)


@pytest.mark.parametrize("tier", [Tier.none, Tier.nvme])
def test_copies_of_one_stage_at_a_time_are_kept_and_counted(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    weights = Engine._weights

    def watched(self: Engine, stage: int) -> Weights:
        found = weights(self, stage)
        kept.append(len(self._views))
        return found

    monkeypatch.setattr(Engine, "_weights", watched)
    directory = synthesize("llama", tmp_path / "model")
    expected = opened(directory, tier).generate(PROMPTS)
    assert max(kept) > 1
    kept.clear()
    runtime = opened(shift(directory, 3), tier)
    assert runtime.generate(PROMPTS) == expected
    assert max(kept) == 1
    asked = map(runtime.request, "ab", PROMPTS)
    plan = runtime.plan([request for request in asked if isinstance(request, Request)])
    (entry,) = [entry for entry in plan.placement.ledgers[0].entries if entry.name == "aligned copy"]
    assert entry.num_bytes == max(runtime.model.shape.sizes.misaligned_bytes) > 0
