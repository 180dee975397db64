"""How the bundled model is made: the same each time, from examples of which some are held back."""

from itertools import islice
from pathlib import Path

import pytest
from safetensors.torch import load_file

from jobs.datasets.kinds.questions import TASKS_PATH
from runtime.checkpoint_source.location import BUNDLED
from scripts.train_tiny.__main__ import train_and_save
from scripts.train_tiny.corpus import evaluation_examples, is_held_back, training_examples, write_prompts
from scripts.train_tiny.stories import STORY
from scripts.train_tiny.tasks import TASKS
from scripts.train_tiny.training import SHAPE, Recipe, new_model, packed_batches
from scripts.train_tiny.vocabulary import train_tokenizer
from tests.test_tree import CONF, read

RECIPE = Recipe(num_steps=2, num_rows=2, num_tokens=64, num_questions=2)


def test_the_same_command_gives_the_same_bits(tmp_path: Path) -> None:
    for name in ("one", "two"):
        train_and_save(tmp_path / name, RECIPE, every=1)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (BUNDLED / "tokenizer.json").read_bytes()
    with pytest.raises(FileExistsError, match="not empty"):
        train_and_save(tmp_path / "one", RECIPE, every=1)


def test_the_bundled_prompts_are_those_that_the_script_writes_and_none_was_trained_on(tmp_path: Path) -> None:
    write_prompts(tmp_path / "tasks.jsonl")
    assert (tmp_path / "tasks.jsonl").read_text() == TASKS_PATH.read_text()
    trained = {example.prompt for example in islice(training_examples(1), 20_000)}
    for task in (*TASKS, STORY):
        asked = {example.prompt for example in evaluation_examples(task, 20, seed=1)}
        assert asked.isdisjoint(trained) or TASKS[task].is_closed
        assert task == STORY or len(asked) == 20


def test_no_example_is_trained_on_that_is_held_back() -> None:
    assert not any(map(is_held_back, islice(training_examples(3), 1000)))


def test_an_example_does_not_see_the_one_before_it_in_its_row() -> None:
    recipe = Recipe(num_rows=1)
    tokenizer = train_tokenizer(recipe.vocab_size, recipe.seed)
    model = new_model(recipe, tokenizer).eval()
    tokens, _, positions = next(packed_batches(tokenizer, recipe))
    start = int((positions[0] == 0).nonzero()[1])
    end = start + 6
    packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0, start:end]
    alone = model(input_ids=tokens[:, start:end], use_cache=False).logits[0]
    assert (packed - alone).abs().max() < 1e-4


def test_the_bundled_model_is_the_recipes_and_small() -> None:
    config = read(CONF / "model" / "tiny.yaml")["architecture"]
    assert isinstance(config, dict)
    told = {key: value for key, value in SHAPE.items() if key != "initializer_range"}
    assert told.items() <= config.items()
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 10_000_000
    weights = load_file(BUNDLED / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}
    table = (BUNDLED / "README.md").read_text()
    assert f"| {Recipe.num_steps} |" in table, "the table ends with the recipe's last step"
    assert str(Recipe()) in table
