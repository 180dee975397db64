import hashlib
import json
import random
from pathlib import Path

import pytest

from jobs.datasets import DatasetConfig, DatasetKind, ReasoningMode, input_digest, read_rows
from jobs.datasets.fields import EvaluationSplit
from jobs.datasets.helm import Item, choose_examples
from jobs.datasets.kinds.helm_reasoning import generate_items
from runtime.errors import ConfigError

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
ITEMS_SHA256 = "c24592f42bc347d6df4612a951f6a153f719912e22957f32477d8f244aedcda6"


def reasoning(mode=ReasoningMode.pattern_match, **settings):
    return read_rows(DatasetConfig(kind=DatasetKind.helm_synthetic_reasoning, mode=mode, **settings))


def count_words(text):
    return len(text.split())


def test_the_items_are_helms_bit_for_bit():
    digest = hashlib.sha256()
    splits = ["train"] * 1000 + ["valid"] * 5000 + ["test"] * 5000
    for split, item in zip(splits, generate_items(ReasoningMode.variable_substitution), strict=True):
        digest.update(f"{split}\t{item.input}\t{item.answer}\n".encode())
    assert digest.hexdigest() == ITEMS_SHA256


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("mode", list(ReasoningMode))
def test_reasoning_prompts_have_helms_form(mode):
    rows = reasoning(mode, limit=3)
    assert [row.id for row in rows] == [f"{mode.value}-{number}" for number in range(3)]
    for row in rows:
        lines = row.prompt.split("\n")
        assert lines[:2] == ["Please solve the following problem.", ""]
        assert lines[-1] == "Target:"
        assert sum(line.startswith("Target: ") for line in lines) == 5
        assert "  " not in row.prompt
    shared = {row.prompt.rsplit("\n\n", 1)[0] for row in rows}
    assert len(shared) == 1


def test_pattern_match_answers_one_of_the_rules_and_has_the_symbols_of_the_result():
    for row in reasoning(limit=50, num_examples=0):
        question = row.prompt.split("\n")[2]
        rules, result = question.removeprefix("Rules: ").split(" | Result: ")
        answer = str(row.columns["reference"])
        assert len(rules.split(" | ")) == 4
        assert answer in rules.split(" | ")
        assert [part for part in result.split() if part in "+-*="] == [
            part for part in answer.split() if part in "+-*="
        ]


def test_variable_substitution_can_be_solved():
    for row in reasoning(ReasoningMode.variable_substitution, limit=50, num_examples=0):
        rule, listed = row.prompt.split("\n")[2].removeprefix("Rules: ").split(" | Substitutions: ")
        words = {part[0]: part.split('"')[1].strip() for part in listed.split(" , ")}
        assert " ".join(words.get(part, part) for part in rule.split()) == row.columns["reference"]


def test_induction_answers_the_rule_behind_two_results():
    for row in reasoning(ReasoningMode.induction, limit=50, num_examples=0):
        assert row.prompt.split("\n")[2].startswith("Two results: ")
        operators = [part for part in str(row.columns["reference"]).removeprefix("Rule: ").split() if part in "+-*="]
        for result in row.prompt.split("\n")[2].removeprefix("Two results: ").split(" | "):
            assert [part for part in result.split() if part in "+-*="] == operators


def test_a_trial_changes_the_examples_and_nothing_else():
    first, second = reasoning(limit=2), reasoning(limit=2, trial=1)
    assert [row.id for row in first] == [row.id for row in second]
    assert [row.columns for row in first] == [row.columns for row in second]
    assert first[0].prompt != second[0].prompt
    assert first[0].prompt.split("\n\n")[-1] == second[0].prompt.split("\n\n")[-1]


def test_reasoning_token_counts_are_the_papers():
    spm = pytest.importorskip("sentencepiece")
    tokenizer = SHARED / "tokenizer" / "mixtral_tokenizer.model.v1"
    if not tokenizer.exists():
        pytest.skip(f"needs {tokenizer}")
    encode = spm.SentencePieceProcessor(model_file=str(tokenizer)).encode
    lengths = [len(encode(row.prompt)) + 1 for row in reasoning()]
    assert len(lengths) == 5000
    assert round(sum(lengths) / len(lengths), 1) == 242.6
    assert max(lengths) == 257


def test_examples_take_turns_by_answer_most_frequent_first():
    items = [
        Item(input=f"{answer}{number}", answer=answer)
        for answer, size in ("a1", "b3", "c2")
        for number in range(int(size))
    ]
    assert [item.answer for item in choose_examples(items, 6, trial=0)] == ["b", "c", "a", "b", "c", "b"]
    assert sorted(item.input for item in choose_examples(items, 99, trial=3)) == sorted(item.input for item in items)
    assert choose_examples(items, 4, trial=5) == choose_examples(items, 4, trial=5)
    assert choose_examples([], 4, trial=5) == []


def test_examples_draw_from_the_answers_in_alphabetical_order():
    items = [Item(input=answer, answer=answer) for answer in "dbca"]
    rng = random.Random(7)
    order = list("abcd")
    rng.shuffle(order)
    assert [item.answer for item in choose_examples(items, 4, trial=7)] == order


def article(number, num_words):
    return " ".join(f"w{number}x{word}" for word in range(num_words))


def write_articles(path, sizes):
    lines = [{"key": f"k{n}", "article": article(n, size), "summary": f"s{n}"} for n, size in enumerate(sizes)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def summarization(path, count_tokens=None, **settings):
    config = DatasetConfig(kind=DatasetKind.helm_summarization, path=path, **{"id_field": "key", **settings})
    return read_rows(config, count_tokens=count_tokens)


def test_a_summarization_prompt_has_helms_form(tmp_path):
    path = write_articles(tmp_path / "a.jsonl", [3])
    examples = write_articles(tmp_path / "b.jsonl", [50])
    (row,) = summarization(path, examples_path=examples)
    ask = "Summarize the above article in 1 sentence."
    assert row.prompt == f"###\nArticle: {article(0, 50)}\n\n{ask}\ns0\n\n###\nArticle: {article(0, 3)}\n\n{ask}"
    assert row.columns["reference"] == "s0"


def test_articles_are_cut_to_512_words_on_one_line(tmp_path):
    line = {"key": 1, "article": "a\nb  c\t" + article(0, 600), "summary": ["the\nfirst", "another"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    (row,) = summarization(str(tmp_path / "a.jsonl"))
    words = row.prompt.split("\n")[1].removeprefix("Article: ").split(" ")
    assert words[:4] == ["a", "b", "c", "w0x0"]
    assert len(words) == 512
    assert row.columns["reference"] == "the first"


def test_examples_have_50_to_150_words_and_are_not_asked(tmp_path):
    sizes = [49, 50, 150, 151, 60, 70, 80, 90]
    rows = summarization(write_articles(tmp_path / "a.jsonl", sizes))
    examples = rows[0].prompt.split("###\n")[1:-1]
    example_sizes = sorted(len(block.split("\n")[0].split()) - 1 for block in examples)
    asked = sorted(sizes[int(row.id[1:])] for row in rows)
    assert len(examples) == 5
    assert all(50 <= size <= 150 for size in example_sizes)
    assert sorted(example_sizes + asked) == sorted(sizes)


def test_row_numbers_are_those_of_the_file_though_examples_are_left_out(tmp_path):
    rows = summarization(write_articles(tmp_path / "a.jsonl", [60, 10, 60, 10]), id_field=None)
    assert [row.id for row in rows] == ["1", "3"]


@pytest.mark.parametrize(
    ("window_tokens", "num_examples_left", "num_words_left"),
    [(323, 3, 40), (322, 2, 40), (252, 1, 40), (182, 0, 40), (113, 0, 40), (112, 0, 39), (74, 0, 1)],
)
def test_fitting_drops_examples_from_the_end_then_words(tmp_path, window_tokens, num_examples_left, num_words_left):
    path = write_articles(tmp_path / "a.jsonl", [40])
    settings = {"examples_path": write_articles(tmp_path / "b.jsonl", [60, 60, 60]), "num_examples": 3}
    (whole,) = summarization(path, **settings)
    (row,) = summarization(path, count_words, window_tokens=window_tokens, **settings)
    blocks = row.prompt.split("\n\n###\n")
    assert blocks[:-1] == whole.prompt.split("\n\n###\n")[:num_examples_left]
    assert blocks[-1].removeprefix("###\n").split("\n")[0] == f"Article: {article(0, num_words_left)}"
    assert blocks[-1].endswith("\n\nSummarize the above article in 1 sentence.")
    assert count_words(row.prompt) + 64 <= window_tokens


def test_a_window_without_room_for_a_word_is_an_error_row(tmp_path):
    (row,) = summarization(write_articles(tmp_path / "a.jsonl", [40]), count_words, window_tokens=70)
    assert "dataset.window_tokens=70" in (row.error or "")


def test_a_window_without_a_counter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset\.window_tokens"):
        summarization(write_articles(tmp_path / "a.jsonl", [40]), window_tokens=2048)


def test_a_bad_article_is_an_error_row_and_no_example(tmp_path):
    lines = [{"key": "a", "article": article(0, 60)}, {"key": "b", "article": " \n", "summary": "s"}, "x"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = summarization(str(tmp_path / "a.jsonl"))
    assert [row.id for row in rows] == ["a", "b", "bad-row-2"]
    assert "dataset.summary_field" in (rows[0].error or "")
    assert "blank" in (rows[1].error or "")


def test_scitldr_reads_as_articles():
    path = SHARED / "scitldr" / "test.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}")
    fields = {"id_field": "paper_id", "article_field": "source", "summary_field": "target"}
    rows = summarization(str(path), count_words, window_tokens=700, limit=100, **fields)
    assert len(rows) == 100
    assert all(row.error is None and count_words(row.prompt) <= 636 for row in rows)
    again = summarization(str(path), count_words, window_tokens=700, limit=100, **fields)
    assert input_digest(rows) == input_digest(again)


@pytest.mark.slow("jobs/test_dataset_helm.py::test_the_items_are_helms_bit_for_bit")
def test_the_validation_split_is_asked_behind_the_same_examples() -> None:
    items = list(generate_items(ReasoningMode.pattern_match))
    tested, valid = reasoning(limit=2), reasoning(split=EvaluationSplit.valid)
    assert [row.columns["reference"] for row in valid] == [item.answer for item in items[1000:6000]]
    assert valid[0].prompt.endswith(f"\n{items[1000].input}\nTarget:")
    assert valid[1].id == "pattern_match-valid-1"
    first = [row.prompt.partition(row.prompt.rsplit("\n\n", 1)[1])[0] for row in (tested[0], valid[0])]
    assert first[0] == first[1]
