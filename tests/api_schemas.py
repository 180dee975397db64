"""Schemas with the shapes of what APIs take and give. Each is bounded, so that a model that knows nothing ends, too.

`python -m tests.api_schemas [ROWS]` has a random model write so many documents, 500 unless said otherwise, and prints
how many are valid.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from runtime import Completion, Prompt, Rejected, Runtime

Schema = dict[str, object]
MAX_NEW_TOKENS = 1500


def text(pattern: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$"}


WORD: Schema = {"type": "string", "maxLength": 8}
DATE: Schema = text("20[0-9]{2}-(0[1-9]|1[0-2])-([0-2][0-9])")
MONEY: Schema = {"type": "number", "minimum": 0, "maximum": 9999.5}


def one_of(*texts: str) -> Schema:
    return {"enum": list(texts)}


def some(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def thing(optional: Sequence[str] = (), **properties: Schema) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def call(name: str, arguments: Schema) -> Schema:
    return thing(name={"const": name}, arguments=arguments)


ADDRESS = thing(street=WORD, number=whole(1, 999), zip=text("[0-9]{5}"), country=one_of("DE", "FR", "US"))
PERSON = thing(("email",), name=WORD, age=whole(0, 120), email=text("[a-z]{1,6}@[a-z]{2,6}\\.org"))
SCHEMAS: Mapping[str, Schema] = {
    "weather call": call("get_weather", thing(location=WORD, unit=one_of("celsius", "fahrenheit"), days=whole(1, 14))),
    "invoice": thing(
        number=text("INV-[0-9]{4}"),
        issued=DATE,
        total=MONEY,
        lines=some(thing(item=WORD, amount=whole(1, 99), price=MONEY), 3, 1),
    ),
    "address": ADDRESS,
    "person": thing(person=PERSON, home=ADDRESS),
    "one of two functions": {"anyOf": [call("add", thing(a=whole(-9, 9), b=whole(-9, 9))), call("ping", thing())]},
    "label": one_of("positive", "neutral", "negative"),
    "labels with scores": some(
        thing(label=one_of("spam", "ham"), score={"type": "number", "minimum": 0, "maximum": 1}), 3
    ),
    "nested arrays": some(some(whole(0, 9), 3, 1), 3, 1),
    "answer and confidence": thing(reasoning=WORD, answer=one_of("A", "B", "C", "D"), confidence=whole(0, 100)),
    "shapes by kind": {
        "oneOf": [
            thing(kind={"const": "circle"}, radius={"type": "number", "minimum": 0, "maximum": 10}),
            thing(kind={"const": "box"}, width=whole(1, 9), height=whole(1, 9)),
        ]
    },
    "maybe": thing(value={"anyOf": [whole(0, 9), {"type": "null"}, {"type": "boolean"}]}),
    "dates": thing(begin=DATE, end=DATE, weekdays=some(one_of("mo", "tu", "we"), 3)),
    "paging": thing(("next",), page=whole(1, 50), next=text("[a-f0-9]{8}"), items=some(WORD, 3)),
    "tree": {
        "$defs": {
            "leaf": thing(name=WORD),
            "node": thing(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
        },
        "$ref": "#/$defs/node",
    },
    "flight": thing(
        origin=text("[A-Z]{3}"), target=text("[A-Z]{3}"), stops=whole(0, 3), cabin=one_of("economy", "business")
    ),
    "query": thing(
        table=one_of("users", "orders"),
        columns=some(one_of("id", "name", "date"), 3, 1),
        where=some(thing(column=one_of("id", "name"), operator=one_of("<", "=", ">"), value=whole(0, 99)), 2),
    ),
    "tuple": {"type": "array", "prefixItems": [WORD, whole(0, 9), {"type": "boolean"}], "items": False, "minItems": 3},
    "device": thing(
        id=text("[0-9a-f]{4}(:[0-9a-f]{4}){2}"),
        on={"type": "boolean"},
        temperature={"type": "number", "minimum": -40, "maximum": 85.5},
    ),
    "extracted entities": thing(people=some(PERSON, 2), places=some(WORD, 2), dates=some(DATE, 2)),
    "multiples": thing(
        cents={"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 5},
        exclusive={"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 7},
    ),
}


def prompts(num_rows: int) -> list[Prompt]:
    """The schemas in turn: greedy documents without whitespace, drawn ones, then both with whitespace, and again."""
    rows = []
    for row in range(num_rows):
        turn, place = divmod(row, len(SCHEMAS))
        schema = list(SCHEMAS.values())[place]
        if turn % 4 < 2:
            schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
        rows.append(Prompt(f"Row {row}", json_schema=schema, temperature=float(turn % 2)))
    return rows


def invalid(prompts: Sequence[Prompt], results: Sequence[Completion | Rejected]) -> list[str]:
    """What is wrong with each completion that is no document of its schema."""
    from jsonschema import Draft202012Validator

    problems = []
    for prompt, result in zip(prompts, results, strict=True):
        assert isinstance(prompt.json_schema, dict)
        try:
            errors = [
                error.message for error in Draft202012Validator(prompt.json_schema).iter_errors(json.loads(result.text))
            ]
        except ValueError as error:
            errors = [str(error)]
        if errors or result.finish.value != "eos":
            problems.append(f"{result.text!r} ({result.finish.value}, {result.error}): {'; '.join(errors)}")
    return problems


def main(num_rows: int) -> None:
    num_asked = prompts(num_rows)
    with Runtime(model="random", max_new_tokens=MAX_NEW_TOKENS) as runtime:
        results = runtime.generate(num_asked)
    wrong = invalid(num_asked, results)
    print(f"{len(results)} rows over {len(SCHEMAS)} schemas, {len(results) - len(wrong)} valid")
    print(Counter(result.finish.value for result in results), *wrong[:5], sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
