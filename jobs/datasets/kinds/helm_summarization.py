"""Makes HELM's summarization prompts from articles of the user, because XSUM and CNN/DailyMail cannot be bundled.

Articles and summaries may be strings or lists (`source` and `target` of SciTLDR). The sentences of an article are
joined by spaces; of several summaries, the first is the reference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runtime.errors import ConfigError

from ..fields import DatasetFields
from ..helm import HELM_KEYS, Item, choose_examples
from ..records import BadRecord, Content, Fields, Json, Record, check_text, read_field
from ..row_rules import CountTokens, InputKind, make_rows
from ..rows import Row
from .jsonl import read_jsonl

MAX_ARTICLE_WORDS = 512
MIN_EXAMPLE_WORDS, MAX_EXAMPLE_WORDS = 50, 150
REQUEST = "Summarize the above article in 1 sentence.\n"


def read_summarization(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """Yields prompts with in-context examples, truncated to `window_tokens`. Raises ConfigError if `count_tokens` is
    needed and missing."""
    if config.window_tokens is not None and count_tokens is None:
        raise ConfigError("dataset.window_tokens needs a tokenizer: pass count_tokens, or set it to null")
    counter = count_tokens or len
    max_bytes = config.max_row_bytes
    records = list(read_jsonl(config.path or "", config.json_field, max_row_bytes=max_bytes))
    if config.examples_path is None:
        selected = select_examples(records, config)
        prompt_records = ((number, record) for number, record in enumerate(records) if number not in selected)
    else:
        path, key = config.examples_path, "examples_path"
        candidates = list(read_jsonl(path, config.json_field, key=key, max_row_bytes=max_bytes))
        selected = select_examples(candidates, config)
        prompt_records = enumerate(records)
    examples = list(selected.values())

    def read_content(fields: Fields) -> Content:
        return build_content(read_item(fields, config), examples, config, counter)

    yield from make_rows(prompt_records, config, read_content, config.id_field)


KINDS = {
    "helm_summarization": InputKind(
        rows=read_summarization,
        keys=HELM_KEYS
        | {"path", "id_field", "json_field", "examples_path", "article_field", "summary_field"}
        | {"window_tokens", "reserve_tokens"},
        needs="dataset.path=articles.jsonl (articles with summaries; not bundled)",
    )
}


def read_item(fields: Fields, config: DatasetFields) -> Item:
    """The article and summary of a record. The article is cut to 512 words, separated by single spaces. Raises
    BadRecord."""
    article = _normalize_text(read_field(fields, config.article_field, "article_field"), "the article", joined=True)
    summary = _normalize_text(read_field(fields, config.summary_field, "summary_field"), "the summary", joined=False)
    return Item(input=" ".join(article.split()[:MAX_ARTICLE_WORDS]), answer=summary)


def select_examples(records: Sequence[Record], config: DatasetFields) -> dict[int, Item]:
    """Selects in-context examples from the readable records with an article of 50 to 150 words. Returns them by their
    positions in `records`, in the order of the prompt."""
    candidates: list[_Example] = []
    for position, record in enumerate(records):
        try:
            item = read_item(record.fields or {}, config)
        except BadRecord:
            continue
        if MIN_EXAMPLE_WORDS <= len(item.input.split()) <= MAX_EXAMPLE_WORDS:
            candidates.append(_Example(input=item.input, answer=item.answer, position=position))
    chosen = choose_examples(candidates, config.num_examples, config.trial)
    return {candidate.position: candidate for candidate in chosen}


def build_content(item: Item, examples: Sequence[Item], config: DatasetFields, count_tokens: CountTokens) -> Content:
    """Makes a prompt that fits into `window_tokens`: drops examples from the end, then words from the end of the
    article.

    Differs from HELM if an article without examples is too long. HELM then truncates the whole prompt, and so loses the
    request after the article. Raises BadRecord if not one word of the article fits.
    """

    def fits(prompt: str) -> bool:
        return config.window_tokens is None or count_tokens(prompt) + config.reserve_tokens <= config.window_tokens

    for num_examples in range(len(examples), -1, -1):
        prompt = _build_prompt(item.input, examples[:num_examples])
        if fits(prompt):
            return Content(prompt=prompt, reference=item.answer)
    words = item.input.split()
    low, high = 0, len(words)  # bisects: `low` words fit, `high` words do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(_build_prompt(" ".join(words[:middle]), [])) else (low, middle)
    if low == 0:
        raise BadRecord(
            f"no word of the article fits in dataset.window_tokens={config.window_tokens} minus "
            f"dataset.reserve_tokens={config.reserve_tokens}"
        )
    return Content(prompt=_build_prompt(" ".join(words[:low]), []), reference=item.answer)


@dataclass(frozen=True, kw_only=True)
class _Example(Item):
    """A candidate for an in-context example, with its position in the records."""

    position: int


def _build_prompt(article: str, examples: Sequence[Item]) -> str:
    blocks = [f"{_block(example.input)}{example.answer}\n" for example in examples]
    return "\n".join([*blocks, _block(article).rstrip()])


def _block(article: str) -> str:
    return f"###\nArticle: {article}\n\n{REQUEST}"


def _normalize_text(value: Json, what: str, joined: bool) -> str:
    if isinstance(value, list) and value:
        texts = [check_text(text, f"a part of {what}") for text in (value if joined else value[:1])]
        value = " ".join(texts)
    words = check_text(value, what).split()
    if not words:
        raise BadRecord(f"{what} is blank")
    return " ".join(words)
