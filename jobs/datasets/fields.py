"""The settings of a dataset except its kind, and the settings of a shard.

A setting with a name in `_field` is the name of a field of the input, such as a column.
"""

from dataclasses import dataclass
from enum import Enum

from runtime.config.settings import require
from runtime.config.texts import require_plain_url
from runtime.units import GIB, MIB

MAX_ROWS = 50_000_000  # that may be in memory; a row has a few KiB
WINDOW_ROWS = 200_000  # of a window, the part of a larger input that is in memory: below 1 GiB for short rows
MAX_INPUT_ROWS = 10**12  # of an input that is read in windows

OVERRIDE_FIELDS = (  # settings for fields with a sampling setting of a row
    *("max_new_tokens_field", "temperature_field", "stop_field", "json_schema_field", "regex_field"),
    "choice_field",
)

TEMPLATE_KEYWORDS = frozenset(  # arguments of `apply_chat_template` that no setting or row may set
    {"conversation", "conversations", "messages", "chat_template", "tokenize", "tools"}
    | {"add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"}
)


class DuplicatePolicy(Enum):
    """What happens to rows with the same id: `refuse` is an error, `first` keeps only the first row of each id."""

    refuse = "refuse"
    first = "first"


class BadRowPolicy(Enum):
    """What happens to an unreadable row: `error_row` writes it to the output with its error, `fail` stops the run
    before generation."""

    error_row = "error_row"
    fail = "fail"


class ReasoningMode(Enum):
    """The task of HELM's synthetic reasoning."""

    pattern_match = "pattern_match"
    variable_substitution = "variable_substitution"
    induction = "induction"


class EvaluationSplit(Enum):
    """The split of HELM's synthetic reasoning. HELM itself samples from both."""

    test = "test"
    valid = "valid"


class Turns(Enum):
    """The turns (user messages) of a multi-turn question that are answered: the `first`, or `all`. The context of a
    later turn is the earlier turns and their answers."""

    first = "first"
    all = "all"


@dataclass(frozen=True, kw_only=True)
class DatasetFields:
    """Where a dataset is, the names of its fields, and how its rows are processed. Each kind uses some of these
    settings."""

    path: str | None = None  # a file or a directory of files; for hub: a hub id or a local directory
    prompt: str | None = None  # for dataset=prompt: the single prompt

    prompt_field: str = "prompt"
    messages_field: str | None = None  # instead of prompt_field: a list of {role, content}
    turns_field: str | None = None  # instead of prompt_field: a list of user messages, one per turn
    turns: Turns = Turns.first  # for dataset=mtbench
    template: str | None = None  # instead of prompt_field: a format string, `Question: {question}\nAnswer:`
    few_shot_path: str | None = None  # file of few-shot examples, of which `num_examples` are drawn
    few_shot_template: str | None = None  # format string of an example with its answer
    tools_field: str | None = None  # a list of tools for the chat template
    id_field: str | None = None  # null: the row's number in the input, counted from 0
    max_new_tokens_field: str | None = None  # per-row sampling.max_new_tokens; a null value: the setting of the run
    temperature_field: str | None = None  # per-row sampling.temperature
    stop_field: str | None = None  # per-row sampling.stop: a string or a list of strings
    json_schema_field: str | None = None  # per-row sampling.json_schema: an object, or its JSON
    regex_field: str | None = None  # per-row sampling.regex
    choice_field: str | None = None  # per-row sampling.choice: a list of strings
    json_field: str | None = None  # dotted path of the list of rows in a .json document: `data.examples`
    csv_delimiter: str = ","
    hub_config: str | None = None
    hub_split: str = "train"
    hub_revision: str | None = None

    answers_path: str | None = None  # answers to judge: a run, a FastChat file, or a directory of FastChat files
    baseline_path: str | None = None  # answers of one baseline model for pairwise judging, in both orders
    references_path: str | None = None  # reference answers in FastChat's format; null: from the questions
    judge_prompts_path: str | None = None  # judge prompts in FastChat's format; null: the bundled ones

    mode: ReasoningMode = ReasoningMode.pattern_match
    split: EvaluationSplit = EvaluationSplit.test
    trial: int = 0  # seed of the in-context examples: HELM's train trial index
    num_examples: int = 5  # in-context examples per prompt
    examples_path: str | None = None  # source of the examples; null: rows of `path`, which are then no prompts
    article_field: str = "article"
    summary_field: str = "summary"
    window_tokens: int | None = None  # limit for prompt + reserve_tokens; null: no truncation
    reserve_tokens: int = 64  # reserved for the completion: sampling.max_new_tokens

    chat_template: bool = False  # render prompts with the model's chat template
    # extra template arguments, e.g. enable_thinking
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    system_prompt: str | None = None
    keep_columns: bool = True  # copy the row's other fields to the output
    max_row_bytes: int = 8 * MIB  # per row as stored: a longer row becomes an error row and is not kept in memory
    window_rows: int | None = None  # output rows in memory at a time; null: WINDOW_ROWS, or as the run was started
    limit: int | None = None  # rows read, before repeat
    repeat: int = 1  # copies of each row; replicas of `a` are `a#1`, `a#2` ...
    dedupe: DuplicatePolicy = DuplicatePolicy.refuse
    on_bad_row: BadRowPolicy = BadRowPolicy.error_row

    @property
    def chat_only_keys(self) -> list[str]:
        """Keys that are set and require a chat template."""
        keys = ("messages_field", "turns_field", "system_prompt", "tools_field", "chat_template_kwargs")
        return [key for key in keys if getattr(self, key)] + (["turns=all"] if self.turns is Turns.all else [])

    @property
    def has_turns(self) -> bool:
        """True if a row may have several turns. Each later turn is computed by a separate run."""
        return self.turns_field is not None or self.turns is Turns.all

    def __post_init__(self) -> None:
        for key in (name for name in vars(self) if name.endswith("path")):
            require_plain_url(getattr(self, key), f"dataset.{key}")
        for key in ("prompt_field", "article_field", "summary_field", "hub_split"):
            require(bool(getattr(self, key)), f"dataset.{key} is empty")
        optional = ("messages_field", "id_field", "json_field", "hub_config", "hub_revision", "examples_path")
        optional += ("answers_path", "baseline_path", "references_path", "judge_prompts_path")
        text_keys = ("template", "few_shot_path", "few_shot_template", "tools_field", "turns_field")
        for key in (*optional, *text_keys, *OVERRIDE_FIELDS):
            require(getattr(self, key) != "", f"dataset.{key} is empty; use null to leave it unset")
        # Exactly one setting says where the prompt is.
        chats = [key for key in ("messages_field", "turns_field") if getattr(self, key) is not None]
        require(len(chats) < 2, "dataset.messages_field and dataset.turns_field exclude each other: set one of them")
        for key in ("template", "few_shot_path"):
            has_both = bool(chats) and getattr(self, key) is not None
            require(not has_both, f"dataset.{key} and dataset.{''.join(chats)} exclude each other: set one of them")
        is_named = self.prompt_field != DatasetFields.prompt_field
        require(
            self.template is None or not is_named,
            f"dataset.prompt_field={self.prompt_field} has no effect with dataset.template: set one of them",
        )
        require(
            (self.few_shot_path is None) == (self.few_shot_template is None),
            "dataset.few_shot_path and dataset.few_shot_template must be set together, "
            "e.g. 'dataset.few_shot_template=\"Question: {question}\\nAnswer: {answer}\"'",
        )
        reserved = sorted(TEMPLATE_KEYWORDS & (self.chat_template_kwargs or {}).keys())
        require(not reserved, f"dataset.chat_template_kwargs.{''.join(reserved[:1])} is reserved: leave it out")
        delimiter = self.csv_delimiter
        require(
            len(delimiter) == 1 and delimiter.isascii() and delimiter not in '"\r\n\0',
            f"dataset.csv_delimiter must be one ASCII character, got {delimiter!r}",
        )
        limit, window = self.limit, self.window_rows
        is_valid = limit is None or 1 <= limit <= MAX_INPUT_ROWS
        require(is_valid, f"dataset.limit must be 1 to {MAX_INPUT_ROWS:,} rows, got {limit}")
        is_valid = window is None or 1 <= window <= MAX_ROWS
        require(is_valid, f"dataset.window_rows must be 1 to {MAX_ROWS:,} rows, or null, got {window}")
        require(1 <= self.repeat <= MAX_ROWS, f"dataset.repeat must be 1 to {MAX_ROWS:,}, got {self.repeat}")
        require(
            1 <= self.max_row_bytes <= GIB,
            f"dataset.max_row_bytes must be 1 to {GIB:,} bytes, got {self.max_row_bytes}",
        )
        require(self.trial >= 0, f"dataset.trial must be 0 or more, got {self.trial}")
        require(0 <= self.num_examples <= 1000, f"dataset.num_examples must be 0 to 1000, got {self.num_examples}")
        require(self.reserve_tokens >= 0, f"dataset.reserve_tokens must be 0 tokens or more, got {self.reserve_tokens}")
        require(
            self.window_tokens is None or self.window_tokens > self.reserve_tokens,
            f"dataset.window_tokens must be above dataset.reserve_tokens={self.reserve_tokens}, "
            f"got {self.window_tokens}",
        )


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """The rows that this process computes: every `count`-th row of the input, beginning with row `index`."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        require(1 <= self.count <= MAX_ROWS, f"shard.count must be 1 to {MAX_ROWS:,}, got {self.count}")
        require(
            0 <= self.index < self.count,
            f"shard.index must be 0 to {self.count - 1} (shard.count={self.count}), got {self.index}",
        )
