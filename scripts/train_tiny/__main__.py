"""python -m scripts.train_tiny DIR: trains the bundled model into a directory that is empty or does not exist.

python -m scripts.train_tiny outputs/tiny                        # as in runtime/data/tiny; minutes on two cores
python -m scripts.train_tiny outputs/tiny --steps 20 --every 10  # a quick test
"""

import argparse
import logging
import sys
from pathlib import Path

from .card import model_card
from .training import Recipe, TrainingProgress, new_model, train
from .vocabulary import train_tokenizer

LOG = logging.getLogger(__name__)


def train_and_save(directory: Path, recipe: Recipe, every: int) -> list[TrainingProgress]:
    """Trains, then writes weights in bfloat16, config, tokenizer and model card. Returns the training table."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; choose another directory")
    tokenizer = train_tokenizer(recipe.vocab_size, recipe.seed)
    model, table = new_model(recipe, tokenizer), list[TrainingProgress]()
    for line in train(model, tokenizer, recipe, every):
        LOG.info("step %d, loss %.3f, %.0f s of CPU time, %s", *_format_progress(line))
        table.append(line)
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    card = model_card(recipe, table, sum(parameter.numel() for parameter in model.parameters()))
    (directory / "README.md").write_text(card, encoding="utf-8")
    return table


def _format_progress(line: TrainingProgress) -> tuple[int, float, float, str]:
    shares = ", ".join(f"{task} {share:.0%}" for task, share in line.accuracy.items())
    return line.step, line.loss, line.processor_seconds, shares


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.train_tiny", description="Trains the bundled model anew.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=Recipe.num_steps)
    parser.add_argument("--every", type=int, default=500, help="steps between two lines of the table")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    train_and_save(options.directory, Recipe(num_steps=options.steps), options.every)


if __name__ == "__main__":
    main(sys.argv[1:])
