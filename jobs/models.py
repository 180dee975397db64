"""python -m jobs.models: the support table, read off the code: each proven family, its lanes, experts and cache."""

from pathlib import Path

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.settings import Composed, ModelsConfig, load


@hydra.main(config_path="../conf", config_name="models", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(ModelsConfig, composed)

    from transformers.utils.logging import set_verbosity_error

    from jobs.planning.named import write_shapes
    from jobs.planning.support import FamilyCapabilities, find_families, format_table, support_table

    set_verbosity_error()  # its warnings are about the tiny sizes, not about the families
    if config.shapes is not None:
        for name in write_shapes(Path(config.shapes)):
            print_line(name)
        return
    if config.formats:
        print_line(format_table(config.format))
        return
    print_line(
        support_table(
            [FamilyCapabilities.from_family(family) for family in find_families(config.family)], config.format
        )
    )


if __name__ == "__main__":
    run_job(main, ModelsConfig)
