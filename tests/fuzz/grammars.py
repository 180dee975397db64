"""What a completion must follow, as rows of a stranger ask for it: schemas, regular expressions, choices, grammars."""

import json
import random
import socket
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.config.settings import SamplingConfig
from runtime.errors import CheckpointError
from runtime.sequences.grammar import llguidance_tokenizer, make_grammar
from runtime.sequences.guide import Guide, fill_masks
from runtime.synthesize.tokenizer import byte_level_tokenizer
from tests.fuzz.mutate import mutated, mutated_json
from tests.fuzz.target import Files, OutsideError, Target

if TYPE_CHECKING:
    from llguidance import LLTokenizer

VOCABULARY, NUM_TOKENS = 640, 8
SCHEMA = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{1,8}$", "minLength": 1},
        "b": {"type": "array", "items": {"$ref": "#/$defs/c"}, "minItems": 1, "maxItems": 3},
        "d": {"anyOf": [{"enum": ["x", "y"]}, {"type": "integer", "minimum": 0, "multipleOf": 5}]},
    },
    "$defs": {"c": {"oneOf": [{"const": 1}, {"type": "number", "format": "x"}, {"type": "null"}]}},
}  # fmt: skip
SEEDS: tuple[Files, ...] = (
    {"json_schema.json": json.dumps(SCHEMA).encode()}, {"regex.txt": rb"(ab|c[d-f]+){1,20}\d{2}(\.\w*)?"},
    {"grammar.txt": b'start: greeting " " NAME\ngreeting: "hello" | "hi"\nNAME: /[a-z]+/\n'},
    {"choice.json": b'["yes", "no", "not \\"sure\\""]'},
)  # fmt: skip
PATTERNS = (
    "(a+)+$", "^(a|a)*b", "(a{1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}", "(.{1,5000}x){1,5000}", "[", "(?=a)b",
    r"\p{L}{1000}", "(" * 5000 + ")" * 5000, "a" * 10**6, "(?i)" + "a|" * 50_000, "x{4294967296}", r"\1(a)", "\0",
    "x{0,18446744073709551616}", "(?#", "\ud800", "(" * 10**5 + "a" + ")" * 10**5,
    "|".join(f"x{i}y" for i in range(10**5)),
)  # fmt: skip
SCHEMAS = (
    '{"$ref":"#"}', '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}', "[]",
    '{"allOf":[{"$ref":"#"}]}', '{"anyOf":[{"$ref":"#"},{"$ref":"#"}]}', '{"not":{"$ref":"#"}}', '{"$ref":5}', "{}",
    '{"$ref":"http://127.0.0.1:9/x.json"}', '{"$ref":"file:///etc/passwd"}', '{"$ref":"/etc/passwd"}',
    '{"$schema":"http://127.0.0.1:9/s","type":"string"}', '{"$id":"http://127.0.0.1:9/","$ref":"x.json"}',
    '{"$dynamicRef":"#x"}', '{"type":"string","minLength":1000000000}', '{"type":"string","maxLength":1e30}',
    '{"type":"array","minItems":100000000}', '{"type":"number","multipleOf":1e-300}', '{"enum":[]}', '{"enum":[NaN]}',
    '{"type":"integer","minimum":1e308,"maximum":-1e308}', '{"const":1e999}', '{"type":["a"]}', '{"properties":[]}',
    '{"x-guidance":{"whitespace_pattern":"(a{1,1000}){1,1000}"}}', '{"x-guidance":5}', '{"const":"\\ud800"}',
    '{"patternProperties":{"(a+)+$":{}},"additionalProperties":false}', '{"patternProperties":{"(":{}}}',
)  # fmt: skip
LARKS = (
    "start: start", "start: a\na: b\nb: a", "start: " + "(" * 3000 + '"a"' + ")" * 3000, 'start: "a" ~ 1..1000000',
    "start: " + "(" * 10**5 + '"a"' + ")" * 10**5, "start: %import common.WORD", '%import /etc/passwd\nstart: "a"',
    'start: %json {"$ref":"#"}', "start:", "\0", 'start: "a" start "b" | start start | ""',
    '{"grammars":' + "[" * 10**5,
    "start: " + '"a"? ' * 20_000, "start: x\nx: " + " | ".join(f'"{i}"' for i in range(50_000)),
)  # fmt: skip


def corpus(home: Path) -> list[Files]:
    deep = [
        before * depth + '{"type":"string"}' + "]}" * depth
        for before in ('{"allOf":[', '{"oneOf":[')
        for depth in (50, 2000)
    ]
    wide = [
        {"enum": [f"v{i}" for i in range(100_000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_000)}},
        {"allOf": [{"anyOf": [{"const": f"{i}{j}"} for j in range(2)]} for i in range(14)]},
    ]
    choices = [[f"c{i}" for i in range(10**5)], ["a" * 10**6, "b"], [""], [], ["\ud800"], ["\0", "\\", "\n", "\u2028"]]
    schemas = [*SCHEMAS, *deep, *map(json.dumps, wide), *(json.dumps({"pattern": each}) for each in PATTERNS)]
    return [
        *({"json_schema.json": text.encode()} for text in schemas),
        *({"regex.txt": text.encode("utf-8", "surrogatepass")} for text in PATTERNS),
        *({"grammar.txt": text.encode()} for text in LARKS),
        *({"choice.json": json.dumps(each).encode()} for each in choices),
    ]


@cache
def tokens() -> "LLTokenizer":
    return llguidance_tokenizer(byte_level_tokenizer(VOCABULARY), VOCABULARY, frozenset({2}))


def check(directory: Path, rng: random.Random) -> None:
    """What is followed may come to an end in the middle: a limit of llguidance is the row's error."""
    from llguidance import LLExecutor, LLMatcher

    (file,) = directory.iterdir()
    text = file.read_bytes().decode("utf-8", "replace" if file.suffix == ".json" else "surrogateescape")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _connect)
        grammar = make_grammar(SamplingConfig(**{file.stem: _choice_of(text) if file.stem == "choice" else text}))  # pyright: ignore[reportArgumentType]
        assert grammar is not None, "it was asked for"
        guide = Guide(matcher=LLMatcher(tokens(), grammar, log_level=0))
        for _ in range(NUM_TOKENS):
            if guide.error is not None:
                raise CheckpointError(guide.error.splitlines()[0])
            mask = fill_masks(LLExecutor(), [guide], VOCABULARY)[0]
            allowed = [token for token in range(VOCABULARY) if int(mask[token // 32]) >> token % 32 & 1]
            if not allowed or guide.matcher.is_stopped():
                return
            guide.matcher.consume_tokens([rng.choice(allowed)])


def _connect(*args: object) -> None:
    raise OutsideError("it connects to another machine")


def _choice_of(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(error)) from error  # of the file; a row's own are texts
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise CheckpointError("no texts")
    return found


TARGETS = (
    Target(
        name="grammar",
        seeds=lambda home: list(SEEDS),
        corpus=corpus,
        check=check,
        how={".json": mutated_json, ".txt": mutated},
    ),
)
