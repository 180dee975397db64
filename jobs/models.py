"""python -m jobs.models: lists the tested model families, with their lanes, experts and cache."""

from pathlib import Path

import hydra
from tqdm import tqdm

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.settings import Composed, ModelsConfig, load


@hydra.main(config_path="../conf", config_name="models", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(ModelsConfig, composed)

    from transformers.utils.logging import set_verbosity_error

    from jobs.planning.named import write_shapes
    from jobs.planning.support import FamilyCapabilities, find_families, format_table, support_table

    set_verbosity_error()  # it warns about the tiny sizes
    if config.shapes is not None:
        for name in write_shapes(Path(config.shapes)):
            print_line(name)
        return
    if config.formats:
        print_line(format_table(config.format))
        return
    families = find_families(config.family)
    with tqdm(families, "looking at classes of transformers", unit="family", leave=False, dynamic_ncols=True) as bar:
        found = [FamilyCapabilities.from_family(family) for family in bar]
    print_line(support_table(found, config.format))


if __name__ == "__main__":
    run_job(main, ModelsConfig)
