"""What each format of weights loses: `python -m tests.weight_loss` prints two tables in about two minutes.

Logits of random models behind 96 tokens, by transformers on the numbers that a packed store decodes to; and the bundled
trained model, packed, on stories and questions that it was not trained on. A model of 1.7 M parameters says what
breaks; how little a large one minds is not shown by it. `python -m tests.weight_loss FILE` writes what packing lost as
lines of JSON; `jobs.models formats=true` shows those of jobs/data/weight_losses.jsonl.
"""

import json
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils.logging import disable_progress_bar

from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import pack
from runtime import Runtime, RuntimeConfig
from runtime.checkpoint_source.location import BUNDLED
from runtime.config.settings import DType, KVConfig, KVDType, ModelConfig
from runtime.formats.module_tensors import METHOD
from runtime.formats.registry import LOSSES, pair_companions
from runtime.plan.shape.dtypes import Loss, WeightStorage
from runtime.store.checkpoint import open_checkpoint
from runtime.weights.stage_weights import load_tensor
from tests.losses import FAMILIES, LogitErrors, TrainedScores, drawn_tokens, perplexity
from tests.quantized import write_checkpoint
from tests.support import synthesize, transformers_model

ROUNDED = [Format.fp8, Format.int8, Format.int4]
WIDE = {"hidden_size": 128, "intermediate_size": 256}  # columns of whole groups
WIDER = {"qwen3-moe": {"moe_intermediate_size": 128}}


def packed(source: Path, format: Format, out: Path) -> Path:
    pack(PackConfig(model=SourceConfig(path=str(source)), out=str(out), format=format, verify=False), lambda *_: None)
    return out


def decoded(source: Path, store: Path, directory: Path) -> Path:
    """A checkpoint of the numbers that a packed store of `source` holds."""
    tensors = pair_companions(open_checkpoint(store).tensors, {"quant_method": METHOD})
    return write_checkpoint(source, directory, {name: load_tensor(each) for name, each in tensors.items()})


@torch.inference_mode()
def logits(directory: Path) -> torch.Tensor:
    return transformers_model(directory)(torch.tensor([drawn_tokens()])).logits[0]


def logit_errors(family: str, directory: Path) -> Iterator[LogitErrors]:
    """Yields by how much logits are off for each rounding format."""
    source = synthesize(family, directory / family, **WIDE, **WIDER.get(family, {}))
    exact = logits(source)
    for format in ROUNDED:
        store = packed(source, format, directory / f"{family}-{format.value}")
        yield LogitErrors.of(logits(decoded(source, store, directory / f"{family}-{format.value}-decoded")), exact)


def options(directory: Path) -> Iterator[tuple[str, str, RuntimeConfig]]:
    """Yields all that may change the trained model's numbers, by name, with what it does to them; the exact one is
    first."""
    exact = RuntimeConfig(model=ModelConfig(dtype=DType.float32))
    yield "as published", Loss.exact.value, exact
    narrow = replace(exact.model, dtype=DType.bfloat16)
    yield "model.dtype=bfloat16", "computes in 16 bits", replace(exact, model=narrow)
    for format in (Format.lossless, *ROUNDED):
        path = packed(BUNDLED, format, directory / format.value)
        loss = Loss.lossless if format is Format.lossless else Loss.lossy
        model = replace(exact.model, name="packed", path=str(path))
        yield f"pack format={format.value}", loss.value, replace(exact, model=model)
    for dtype in (KVDType.int8, KVDType.int4):
        yield f"kv.dtype={dtype.value}", Loss.lossy.value, replace(exact, kv=KVConfig(dtype=dtype))


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the trained model makes of stories and questions by one of `options`."""

    option: str
    loss: str
    numbers: WeightStorage
    found: TrainedScores
    exact: TrainedScores

    @property
    def ratio(self) -> list[float]:
        """The perplexity of stories as a multiple of the exact one, and the ends of its interval."""
        beyond = self.found.beyond(self.exact)
        return [math.exp(value or 0.0) for value in (beyond.mean, beyond.low, beyond.high)]

    def __str__(self) -> str:
        (ratio, low, high), right = self.ratio, self.found.right
        error = self.numbers.relative_error
        cells = [
            f"`{self.option}`",
            self.loss,
            "-" if error is None else f"{error:.2%}",
            f"{perplexity(self.found.told):.4f}",
            f"{ratio:.4f} ({low:.4f} to {high:.4f})",
            f"{right.mean or 0:.1%} ({right.low or 0:.1%} to {right.high or 0:.1%})",
            f"{perplexity(self.found.asked):.4f}",
        ]
        return f"| {' | '.join(cells)} |"

    def to_json(self) -> str:
        """What `jobs.models` says of a rounding format."""
        (format,) = [name for name in self.numbers.formats if name in LOSSES and LOSSES[name] is Loss.lossy]
        right = self.found.right
        figures = {
            "weight_error": self.numbers.relative_error or 0.0,
            "perplexity_ratio": self.ratio[0],
            "right": right.mean or 0.0,
        }
        return json.dumps({"format": format, **{name: round(figure, 6) for name, figure in figures.items()}})


def trained_rows(directory: Path) -> Iterator[Row]:
    """Yields a row for each of `options`."""
    exact = None
    for option, loss, config in options(directory):
        runtime = Runtime(config)
        scores = TrainedScores.of(runtime)
        exact = exact or scores
        yield Row(option=option, loss=loss, numbers=runtime.model.weight_storage, found=scores, exact=exact)


def main() -> None:
    logging.disable(logging.WARNING)
    disable_progress_bar()
    names = [f"{format.value}: norm, largest, KL" for format in ROUNDED]
    print(f"| logits off by | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    rows = list[Row]()
    with TemporaryDirectory() as directory:
        for family in FAMILIES:
            errors = [
                f"{100 * each.relative:.3g} %, {each.largest:.2g}, {each.divergence:.2g}"
                for each in logit_errors(family, Path(directory))
            ]
            print(f"| {family} | {' | '.join(errors)} |", flush=True)
        head = ("`model=tiny`", "numbers", "weights off by", "perplexity of stories", "as a multiple", "answers right")
        print(f"\n| {' | '.join(head)} | perplexity of answers |\n|{'---|' * (len(head) + 1)}")
        for row in trained_rows(Path(directory)):
            rows.append(row)
            print(row, flush=True)
    if len(sys.argv) > 1:
        lines = [row.to_json() + "\n" for row in rows if row.numbers.loss is Loss.lossy]
        Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
