"""What rounding costs a trained model of 135 M parameters: `python -m tests.real_losses`, the rest of `make real`.

Its weights are four-bit numbers of another grid to begin with, dequantised to bfloat16: rounding them again is not what
rounding published weights is. How little a large model minds is not shown by it.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils.logging import disable_progress_bar

from jobs.packing.config import Format
from runtime import Runtime
from runtime.config.settings import KVConfig, KVDType
from runtime.units import MIB
from scripts import trained_model
from tests import real_model
from tests.losses import nats_beyond, perplexity
from tests.weight_loss import ROUNDED, packed


def options(source: Path, directory: Path) -> Iterator[tuple[str, Path, dict[str, object]]]:
    """Yields name, checkpoint and keywords of whatever changes the numbers; the exact one is first."""
    yield "as dequantised", source, {}
    yield "model.dtype=bfloat16", source, {"dtype": "bfloat16"}
    for format in (Format.lossless, *ROUNDED):
        yield f"pack format={format.value}", packed(source, format, directory / format.value), {}
    for dtype in KVDType:
        if dtype is not KVDType.auto:
            yield f"kv.dtype={dtype.value}", source, {"kv": KVConfig(dtype=dtype)}


def main() -> None:
    logging.disable(logging.WARNING)
    disable_progress_bar()
    try:
        file = trained_model.fetch()
    except trained_model.UnavailableError as error:
        print(f"nothing measured: {error}")
        return
    head = "weights, MiB | weights off by | KV, bytes a token | perplexity | as a multiple"
    exact = None
    with TemporaryDirectory() as home:
        source = real_model.write_dequantized(file, Path(home) / "bfloat16", torch.bfloat16)
        for name, path, more in options(source, Path(home)):
            settings = {"model": str(path), "offload": "none", "dtype": "float32", **more}
            with Runtime(**settings) as runtime:  # pyright: ignore[reportArgumentType]
                tokenizer = runtime.model.tokenizer
                assert tokenizer is not None
                ids = [tokenizer(text)["input_ids"] for text in real_model.documents()]
                results = runtime.score([(each[:1], each[1:]) for each in ids])
                error, kv_bytes = runtime.model.weight_storage.relative_error, runtime.model.shape.kv_bytes_per_token
            if exact is None:
                exact = results
                num_tokens = sum(each.num_target_tokens for each in results)
                print(f"\n{len(results)} documents, {num_tokens:,} tokens\n\n| {file.stem} | {head} |\n|{'---|' * 6}")
            beyond = nats_beyond(results, exact)
            ratio, low, high = (math.exp(value or 0.0) for value in (beyond.mean, beyond.low, beyond.high))
            size = sum(each.stat().st_size for each in path.glob("*.safetensors")) / MIB
            off = "-" if error is None else f"{error:.2%}"
            shown = f"{perplexity(results):.3f} | {ratio:.4f} ({low:.4f} to {high:.4f})"
            print(f"| `{name}` | {size:,.0f} | {off} | {kv_bytes:,} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
