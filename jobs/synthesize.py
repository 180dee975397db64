"""python -m jobs.synthesize: writes a checkpoint of random weights in a real architecture, shard by shard."""

from pathlib import Path

import hydra
from tqdm import tqdm

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.settings import Composed, SynthesizeConfig, load
from runtime.units import GIB


@hydra.main(config_path="../conf", config_name="synthesize", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(SynthesizeConfig, composed)
    setup_plain_logging(config.log_level)

    import torch

    from runtime.synthesize.checkpoints import synthesize_checkpoint

    overrides = dict(config.architecture)
    model_type = overrides.pop("model_type")
    overrides.pop("quantization_config", None)  # random weights are not quantized
    assert isinstance(model_type, str), "the config class has checked it"
    assert config.out is not None, "the config class has checked it"
    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:

        def progress(done_bytes: int, total_bytes: int) -> None:
            bar.total = total_bytes
            bar.update(done_bytes - bar.n)

        report = synthesize_checkpoint(
            model=model_type,
            overrides=overrides,
            directory=Path(config.out),
            seed=config.seed,
            dtype=getattr(torch, config.dtype.value),
            max_shard_bytes=int(config.max_shard_gib * GIB),
            alignment_bytes=config.alignment_bytes,
            tokenizer_path=Path(config.tokenizer) if config.tokenizer else None,
            progress=progress,
        )
    print_line(f"{config.out}: {report}")


if __name__ == "__main__":
    run_job(main, SynthesizeConfig)
