"""What readers and row rules go by: all settings of a data set but its kind, and shards of its rows."""

from dataclasses import dataclass
from enum import Enum

from runtime.config.settings import require
from runtime.config.texts import require_plain_url
from runtime.units import GIB, MIB

MAX_ROWS = 50_000_000  # that are held at once, each in a few KiB
WINDOW_ROWS = 200_000  # that are held at once of an input with more: below 1 GiB where rows are short
MAX_INPUT_ROWS = 10**12  # of an input that is read in windows

OVERRIDE_FIELDS = (  # of what a row may ask for itself
    *("max_new_tokens_field", "temperature_field", "stop_field", "json_schema_field", "regex_field"),
    "choice_field",
)

TEMPLATE_KEYWORDS = frozenset(  # of the chat renderer, which no setting and no row may pass
    {"conversation", "conversations", "messages", "chat_template", "tokenize", "tools"}
    | {"add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"}
)


class DuplicatePolicy(Enum):
    """What two rows with one id mean: `refuse` the input, or keep the `first` of them."""

    refuse = "refuse"
    first = "first"


class BadRowPolicy(Enum):
    """What an unreadable row means: an `error_row` in the output, or `fail` before anything is generated."""

    error_row = "error_row"
    fail = "fail"


class ReasoningMode(Enum):
    pattern_match = "pattern_match"
    variable_substitution = "variable_substitution"
    induction = "induction"


class EvaluationSplit(Enum):
    """Which items of HELM's synthetic reasoning are asked: HELM itself draws from both."""

    test = "test"
    valid = "valid"


class Turns(Enum):
    """Which of a question's messages are asked: the `first`, or `all`, each behind the answers to those before it."""

    first = "first"
    all = "all"


@dataclass(frozen=True, kw_only=True)
class DatasetFields:
    """Where a data set is, what its records are called, and what is done with its rows; kinds read some of these."""

    path: str | None = None  # a file or a directory of files; for hub: a hub id or a local directory
    prompt: str | None = None  # the only one, of dataset=prompt

    prompt_field: str = "prompt"
    messages_field: str | None = None  # instead of prompt_field: a list of {role, content}
    turns_field: str | None = None  # instead of prompt_field: a list of texts, what the user says turn by turn
    turns: Turns = Turns.first  # of dataset=mtbench
    template: str | None = None  # instead of prompt_field: a text with fields in it, `Question: {question}\nAnswer:`
    few_shot_path: str | None = None  # examples in front of each prompt: `num_examples` of them, chosen by `trial`
    few_shot_template: str | None = None  # what an example looks like, its answer included
    tools_field: str | None = None  # a list of tools, for the chat template
    id_field: str | None = None  # null: the row's number in the input, counted from 0
    max_new_tokens_field: str | None = None  # a row's own sampling.max_new_tokens; where it is null: the run's
    temperature_field: str | None = None  # a row's own sampling.temperature
    stop_field: str | None = None  # a row's own sampling.stop: a text, or a list of texts
    json_schema_field: str | None = None  # a row's own sampling.json_schema: an object, or its JSON
    regex_field: str | None = None  # a row's own sampling.regex
    choice_field: str | None = None  # a row's own sampling.choice: a list of texts
    json_field: str | None = None  # where the list of rows lies in a .json document, dotted: `data.examples`
    csv_delimiter: str = ","
    hub_config: str | None = None
    hub_split: str = "train"
    hub_revision: str | None = None

    answers_path: str | None = None  # what is judged: a run, a file of FastChat's, or a directory of them
    baseline_path: str | None = None  # answers of one other model: each is judged beside its own, in both orders
    references_path: str | None = None  # right answers in FastChat's form; null: those of the questions
    judge_prompts_path: str | None = None  # what the judge is told, in FastChat's form; null: in our words

    mode: ReasoningMode = ReasoningMode.pattern_match
    split: EvaluationSplit = EvaluationSplit.test
    trial: int = 0  # which in-context examples: HELM's train trial index
    num_examples: int = 5  # in-context examples per prompt
    examples_path: str | None = None  # where they come from; null: from `path`, and then not asked themselves
    article_field: str = "article"
    summary_field: str = "summary"
    window_tokens: int | None = None  # prompt + reserve_tokens must fit; null: nothing is cut
    reserve_tokens: int = 64  # kept free for the completion: sampling.max_new_tokens

    chat_template: bool = False  # render through the model's own template
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None  # more for the template: enable_thinking
    system_prompt: str | None = None
    keep_columns: bool = True  # pass the row's other fields through to the output
    max_row_bytes: int = 8 * MIB  # of one row as it is stored: a longer one is an error row and is not kept in memory
    window_rows: int | None = None  # rows of the output that are held at a time; null: WINDOW_ROWS, or as begun
    limit: int | None = None  # rows read, before repeat
    repeat: int = 1  # times each row is asked; replicas of `a` are `a#1`, `a#2` ...
    dedupe: DuplicatePolicy = DuplicatePolicy.refuse
    on_bad_row: BadRowPolicy = BadRowPolicy.error_row

    @property
    def chat_only_keys(self) -> list[str]:
        """The keys that are set and mean nothing where no chat template is applied."""
        keys = ("messages_field", "turns_field", "system_prompt", "tools_field", "chat_template_kwargs")
        return [key for key in keys if getattr(self, key)] + (["turns=all"] if self.turns is Turns.all else [])

    @property
    def has_turns(self) -> bool:
        """Whether a row may be a chat of several turns, which are runs one after another."""
        return self.turns_field is not None or self.turns is Turns.all

    def __post_init__(self) -> None:
        for key in (name for name in vars(self) if name.endswith("path")):
            require_plain_url(getattr(self, key), f"dataset.{key}")
        for key in ("prompt_field", "article_field", "summary_field", "hub_split"):
            require(bool(getattr(self, key)), f"dataset.{key} is empty")
        optional = ("messages_field", "id_field", "json_field", "hub_config", "hub_revision", "examples_path")
        optional += ("answers_path", "baseline_path", "references_path", "judge_prompts_path")
        forms = ("template", "few_shot_path", "few_shot_template", "tools_field", "turns_field")
        for key in (*optional, *forms, *OVERRIDE_FIELDS):
            require(getattr(self, key) != "", f"dataset.{key} is empty; use null to leave it unset")
        # what a prompt is made of is said in one way, with all that it needs
        chats = [key for key in ("messages_field", "turns_field") if getattr(self, key) is not None]
        require(len(chats) < 2, "dataset.messages_field and dataset.turns_field both have chats: set one of them")
        for key in ("template", "few_shot_path"):
            is_chat = bool(chats) and getattr(self, key) is not None
            require(not is_chat, f"dataset.{key} makes prompts, dataset.{''.join(chats)} has chats: set one of them")
        is_named = self.prompt_field != DatasetFields.prompt_field
        require(
            self.template is None or not is_named,
            f"dataset.prompt_field={self.prompt_field} has no effect beside dataset.template: set one of them",
        )
        require(
            (self.few_shot_path is None) == (self.few_shot_template is None),
            "dataset.few_shot_path and dataset.few_shot_template need each other: which examples, and how one looks, "
            "e.g. 'dataset.few_shot_template=\"Question: {question}\\nAnswer: {answer}\"'",
        )
        taken = sorted(TEMPLATE_KEYWORDS & (self.chat_template_kwargs or {}).keys())
        require(not taken, f"dataset.chat_template_kwargs.{''.join(taken[:1])} is set by the run itself")
        delimiter = self.csv_delimiter
        require(
            len(delimiter) == 1 and delimiter.isascii() and delimiter not in '"\r\n\0',
            f"dataset.csv_delimiter must be one ASCII character, got {delimiter!r}",
        )
        limit = self.limit
        is_possible = limit is None or 1 <= limit <= MAX_INPUT_ROWS
        require(is_possible, f"dataset.limit must be 1 to {MAX_INPUT_ROWS:,} rows, got {limit}")
        window = self.window_rows
        is_possible = window is None or 1 <= window <= MAX_ROWS
        require(is_possible, f"dataset.window_rows must be 1 to {MAX_ROWS:,} rows, or null, got {window}")
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
    """Which part of the rows this process takes: every `count`-th, starting at `index`."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        require(1 <= self.count <= MAX_ROWS, f"shard.count must be 1 to {MAX_ROWS:,}, got {self.count}")
        require(
            0 <= self.index < self.count,
            f"shard.index must be 0 to {self.count - 1} (shard.count={self.count}), got {self.index}",
        )
