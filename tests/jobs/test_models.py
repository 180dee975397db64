"""The support table as text: a line for each family that was asked for, in columns or in Markdown."""

import sys
from pathlib import Path

import pytest

from jobs import models
from jobs.config.cli import run_job
from jobs.config.settings import ModelsConfig, TableFormat
from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import compute_relative_error, pack
from jobs.planning.published import read_losses
from jobs.planning.support import FamilyCapabilities, find_families, format_table, support_table
from runtime.checkpoint_source.location import BUNDLED
from runtime.config.settings import Lanes
from runtime.errors import ConfigError
from runtime.formats.kinds.rounded import ENCODINGS, Rounding
from runtime.formats.registry import LOSSES
from runtime.model.capabilities import CacheKind, ExpertKind
from runtime.model.families import FAMILIES
from runtime.plan.shape.dtypes import Loss

ROWS = [
    FamilyCapabilities(
        name="mixtral",
        model_type="mixtral",
        lanes=Lanes.packed,
        experts=ExpertKind.sorted,
        cache=CacheKind.kv,
        note="",
    ),
    FamilyCapabilities(
        name="bloom",
        model_type="bloom",
        lanes=Lanes.padded,
        experts=ExpertKind.none,
        cache=CacheKind.kv,
        note="own attention code",
    ),
    FamilyCapabilities(
        name="new", model_type="nowhere", lanes=None, experts=None, cache=None, note="not in transformers 1"
    ),
]


def test_columns_are_aligned() -> None:
    assert support_table(ROWS, TableFormat.text).splitlines()[:4] == [
        "family   model_type  lanes                       experts  cache  tested",
        "mixtral  mixtral     packed                      sorted   KV     greedy, sampled",
        "bloom    bloom       padded: own attention code  -        KV     greedy, sampled",
        "new      nowhere     not in transformers 1                       no",
    ]


def test_markdown_has_the_same_cells() -> None:
    assert support_table(ROWS, TableFormat.markdown).splitlines()[:5] == [
        "| family | model_type | lanes | experts | cache | tested |",
        "| --- | --- | --- | --- | --- | --- |",
        "| mixtral | mixtral | packed | sorted | KV | greedy, sampled |",
        "| bloom | bloom | padded: own attention code | - | KV | greedy, sampled |",
        "| new | nowhere | not in transformers 1 |  |  | no |",
    ]


def test_storage_formats_are_listed_with_their_bytes() -> None:
    lines = format_table(TableFormat.text).splitlines()
    assert lines[0].split()[:6] == ["format", "bytes", "a", "number", "numbers", "companions"]
    assert "awq-int4 0.52 exact scales, zeros" in [" ".join(line.split()) for line in lines]
    assert lines[-1].startswith("quant_method of config.json: awq, bitsandbytes, compressed-tensors, ")


def test_rounding_formats_say_what_was_measured_of_them() -> None:
    rows = {line.split()[0]: line for line in format_table(TableFormat.text).splitlines() if line}
    for row in read_losses():
        said = f"lossy    scales  weights off by {row['weight_error']:.2%}, perplexity x {row['perplexity_ratio']:.4f}"
        assert " ".join(said.split()) in " ".join(rows[row["format"]].split())
    assert {row["format"] for row in read_losses()} == {name for name, loss in LOSSES.items() if loss is Loss.lossy}


@pytest.mark.parametrize("way", ENCODINGS)
def test_weights_are_off_by_what_is_said_of_their_format(way: str, tmp_path: Path) -> None:
    config = PackConfig(model=SourceConfig(path=str(BUNDLED)), out=str(tmp_path / "store"), format=Format[way])
    error = compute_relative_error(pack(config, lambda *_: None).tensors)
    (said,) = [row["weight_error"] for row in read_losses() if row["format"] == Rounding(way).format]
    assert error == pytest.approx(said, rel=1e-4)


def test_families_are_chosen_by_part_of_a_name_or_type() -> None:
    assert find_families(None) == list(FAMILIES.values())
    assert [family.name for family in find_families("gemma")] == ["gemma-2", "gemma-3"]
    assert [family.name for family in find_families("gptj")] == ["gpt-j"]
    with pytest.raises(ConfigError, match=r"family=nothing .*llama"):
        find_families("nothing")


def test_program_prints_a_line_for_each_family_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # run_job sets it; this puts it back
    monkeypatch.setattr(sys, "argv", ["models", "family=falcon"])
    with pytest.raises(SystemExit) as ended:
        run_job(models.main, ModelsConfig)
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert [line.split("  ")[0] for line in lines[1:4]] == ["falcon, first", "falcon, alibi", "falcon, new"]
