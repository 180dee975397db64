"""Structured output: a completion is of its grammar whatever the model would say, and otherwise what transformers'
`generate` gives with the same mask; where it cannot be, that is said.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime import Completion, Prompt, Rejected, Runtime, SamplingConfig
from runtime.errors import ConfigError, Interrupted
from runtime.sequences import grammar
from runtime.sequences.detokenizer import Detokenizer
from runtime.sequences.grammar import Grammars, llguidance_tokenizer, make_grammar
from runtime.sequences.guide import fill_masks
from runtime.sequences.reasoning import SplitText
from runtime.sequences.sampler import Sampler
from runtime.sequences.sequence import FinishReason, Request
from runtime.sequences.sequence import Sequence as Running
from runtime.synthesize.tokenizer import byte_level_tokenizer, load_local_tokenizer
from tests.api_schemas import MAX_NEW_TOKENS, SCHEMAS, invalid, prompts
from tests.dealt import with_slow_others
from tests.runtime.sampling_support import logits_for, step
from tests.support import SHARED_DATA
from tests.tokenizer_kinds import EOS_ID, EVEN, tokenizer_of

llguidance, jsonschema = pytest.importorskip("llguidance"), pytest.importorskip("jsonschema")
MIXTRAL_TOKENIZER = SHARED_DATA / "tokenizer" / "mixtral_tokenizer.model.v1"
SCHEMA = {**SCHEMAS["invoice"], "x-guidance": {"whitespace_flexible": False}}
WAYS: dict[str, dict[str, object]] = {
    "waves from disk": {"offload": "nvme", "resident_layers": 0, "admission": "wave"},
    "continuous": {"admission": "continuous", "micro_batch_size": 6, "num_micro_batches": 2, "policy": "fixed"},
    "batched by module": {"offload": "cpu", "schedule": "module_batched"},
}


def runtime_of(**settings: object) -> Runtime:
    return Runtime(model="random", max_new_tokens=MAX_NEW_TOKENS, **settings)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return [result.token_ids for result in runtime_of(offload="none").generate(prompts(len(SCHEMAS)))]


@pytest.mark.parametrize("way", with_slow_others(WAYS, ["continuous"]))
def test_documents_of_every_schema_are_valid_and_the_same_however_the_run_is_scheduled(
    way: str, plain: list[tuple[int, ...]]
) -> None:
    asked = prompts(len(SCHEMAS))
    results = runtime_of(**WAYS[way]).generate(asked)
    assert invalid(asked, results) == []
    assert [result.token_ids for result in results] == plain


class Mask(LogitsProcessor):
    """llguidance's mask as a caller of transformers would put it in, bit by bit, behind `num_free` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_free: int, sampling: SamplingConfig):
        tokens = llguidance_tokenizer(tokenizer, 512, frozenset([2]))
        self._matcher, self._num_seen = llguidance.LLMatcher(tokens, make_grammar(sampling)), num_free

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < self._num_seen:
            return scores
        for token in input_ids[0, self._num_seen :].tolist():
            assert self._matcher.consume_token(token)
        self._num_seen = input_ids.shape[1]
        bias = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8)
        return torch.where(torch.from_numpy(bias > 0)[None], scores, -torch.inf)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    path = runtime_of().model.checkpoint.path
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.4},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 3},
    ],
    ids=str,
)
def test_tokens_equal_transformers_with_the_same_mask(settings: dict[str, float], model: PreTrainedModel) -> None:
    runtime = runtime_of(json_schema=SCHEMA, **settings)
    sampling, tokenizer = runtime.config.sampling, runtime.model.tokenizer
    assert tokenizer is not None
    (result,) = runtime.generate(["An invoice:"])
    assert isinstance(result, Completion)
    ids = torch.tensor([result.request.prompt_ids])
    torch.manual_seed(result.request.seed(sampling.seed))
    warping = {} if sampling.is_greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p}
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        logits_processor=LogitsProcessorList([Mask(tokenizer, ids.shape[1], sampling)]),
        do_sample=not sampling.is_greedy,
        repetition_penalty=sampling.repetition_penalty,
        top_k=sampling.top_k if not sampling.is_greedy else None,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=2,
        pad_token_id=0,
        **warping,
    )
    assert list(result.token_ids) == expected[0, ids.shape[1] :].tolist()
    assert result.finish is FinishReason.eos


THOUGHTS = ["Think: <think>", "Say <think>", "A <think>\n"]
TAGS = ["<think>", " bani"]  # the second is what the random model says to the first two of them, and not to the third
STRUCTURES: dict[str, dict[str, object]] = {
    "choice": {"choice": ["yes", "yes please", "no"]},
    "regex": {"regex": " [a-c]{4}"},
    "json_schema": {"json_schema": SCHEMA},
    "grammar": {"grammar": 'start: "<" /[0-9]+/ ">"'},
}


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("structure", with_slow_others(STRUCTURES, ["regex"]))
def test_behind_reasoning_tokens_equal_transformers_with_the_mask_from_the_end_tag_on(
    structure: str, temperature: float, model: PreTrainedModel
) -> None:
    """And the reasoning is what it is without a structure, also where it never ends."""
    settings = {"max_new_tokens": 200, "temperature": temperature, "seed": 6, "ignore_eos": False}
    asked = [*THOUGHTS, Prompt(THOUGHTS[1], max_new_tokens=4)]
    free = Runtime(model="random", **settings).generate(asked)  # pyright: ignore[reportArgumentType]
    expected = dict[int, list[int]]()
    for way in WAYS.values():
        runtime = Runtime(model="random", reasoning=TAGS, **settings, **STRUCTURES[structure], **way)  # pyright: ignore
        sampling, tokenizer = runtime.config.sampling, runtime.model.tokenizer
        assert tokenizer is not None
        results = runtime.generate(asked)
        for place, (result, plain) in enumerate(zip(results, free, strict=True)):
            assert isinstance(result, Completion)
            assert isinstance(plain, Completion)
            before, tag, _ = plain.text.partition(TAGS[1])
            if not tag:
                assert result.token_ids == plain.token_ids
                assert (result.reasoning, result.text, result.finish) == (plain.text.strip(), "", plain.finish)
                continue
            num_free = next(n for n in range(200) if tag in tokenizer.decode(plain.token_ids[:n]))
            if place not in expected:
                ids = torch.tensor([result.request.prompt_ids])
                torch.manual_seed(result.request.seed(sampling.seed))
                answer = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    logits_processor=LogitsProcessorList([Mask(tokenizer, ids.shape[1] + num_free, sampling)]),
                    do_sample=temperature > 0,
                    temperature=temperature or None,
                    top_k=0 if temperature else None,
                    max_new_tokens=200,
                    eos_token_id=2,
                    pad_token_id=0,
                )
                expected[place] = answer[0, ids.shape[1] :].tolist()
            assert list(result.token_ids) == expected[place]
            assert result.reasoning == before.strip()
            is_whole = result.finish is FinishReason.eos
            assert is_whole or len(result.token_ids) == 200
            assert grammar_accepts(tokenizer, sampling, result.text) is is_whole
        assert [result.text == "" for result in results].count(False) > 1
        assert results[-1].text == ""


def grammar_accepts(tokenizer: PreTrainedTokenizerBase, sampling: SamplingConfig, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance_tokenizer(tokenizer, 512, frozenset([2])), make_grammar(sampling))
    return matcher.consume_tokens(tokenizer(text, add_special_tokens=False)["input_ids"]) and matcher.is_accepting()


@pytest.mark.slow("runtime/test_structured.py::test_stopped_anywhere_a_row_goes_on_in_its_grammar")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_stopped_anywhere_a_row_that_thinks_goes_on_to_the_same_answer(temperature: float) -> None:
    runtime = runtime_of(json_schema=SCHEMA, reasoning=TAGS, temperature=temperature, seed=6)
    request = runtime.request("0", THOUGHTS[0])
    assert isinstance(request, Request)
    plan = runtime.plan([request])
    with runtime.session(plan) as session:
        ((_, whole),) = session.wave(plan.blocks[0], [0], [request], {})
    tokenizer = runtime.model.tokenizer
    assert tokenizer is not None
    num_thought = next(n for n in range(200) if TAGS[1] in tokenizer.decode(whole.token_ids[:n]))
    for num_passes in (1, num_thought - 1, num_thought, num_thought + 1, num_thought + 20):
        with runtime.session(plan) as session:
            with pytest.raises(Interrupted):
                list(session.wave(plan.blocks[0], [0], [request], {}, on_pass=stop_behind(num_passes)))
            unfinished = session.snapshot()
        with runtime.session(plan) as session:
            ((_, resumed),) = session.wave(plan.blocks[0], [0], [request], unfinished)
        assert (resumed.token_ids, resumed.reasoning, resumed.text) == (whole.token_ids, whole.reasoning, whole.text)


@pytest.mark.slow(
    "runtime/test_structured.py::test_behind_reasoning_tokens_equal_transformers_with_the_mask_from_the_end_tag_on"
)
def test_rows_samples_and_their_own_structures_each_think_alone() -> None:
    runtime = Runtime(
        model="random", choice=["red", "green"], reasoning=TAGS, n=3, temperature=0.9, seed=6, max_new_tokens=300
    )
    asked = [Prompt(THOUGHTS[0], id="0"), Prompt(THOUGHTS[1], id="1", regex="[a-z]{6}")]
    results = runtime.generate(asked)
    answered = [result for result in results if isinstance(result, Completion) and result.finish is FinishReason.eos]
    assert len(answered) > 2
    assert all(result.text in ("red", "green") for result in answered if result.id == "0")
    assert all(len(result.text) == 6 and result.text.isalpha() for result in answered if result.id == "1")
    assert len({result.reasoning for result in answered}) == len(answered)
    alone = [result.token_ids for prompt in asked for result in runtime.generate([prompt])]
    assert [result.token_ids for result in results] == alone


@pytest.mark.parametrize("kind", ["in the text", "a token", "a special token"])
@pytest.mark.parametrize(
    ("wanted", "reasoning", "text"),
    [
        ("<think>hm</think>no", "hm", "no"),
        ("\n<think>hm</think>no", "hm", "no"),
        ("no", None, "no"),
        ("<the>", None, "<the>"),
        ("<xhm", None, "<the>"),
    ],
)
def test_what_does_not_begin_to_think_is_of_its_structure_from_the_first_token_on(
    kind: str, wanted: str, reasoning: str | None, text: str
) -> None:
    tokenizer = byte_level_tokenizer(270)
    if kind != "in the text":
        tokenizer.add_tokens(["<think>", "</think>"], special_tokens=kind == "a special token")
    sampling = SamplingConfig(reasoning=["<think>", "</think>"], choice=["no", "<the>"])
    sampler = Sampler(sampling, vocab_size=272, eos_token_ids=frozenset([2]), tokenizer=tokenizer)
    request = Request(id="a", prompt_ids=(1,), max_new_tokens=50, grammar=make_grammar(sampling))
    row, tags = Running(request=request), {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
    ids: list[int] = []
    for part in re.split("(</?think>)", wanted):
        ids += [tags[part]] if part in tags else tokenizer.encode(part, add_special_tokens=False)
    while row.finish is None:
        step(sampler, [row], logits_for([*ids, *[2] * 50][len(row.generated)], size=272), 0)
    assert row.error is None
    assert row.finish is FinishReason.eos
    assert sampler.reasoning is not None
    assert sampler.reasoning.split(row) == SplitText(reasoning=reasoning, text=text)


def test_an_end_tag_in_an_answer_that_nothing_was_thought_before_is_of_the_answer() -> None:
    sampling = SamplingConfig(reasoning=["<think>", "</think>"], choice=["ab</think>c"])
    tokenizer = byte_level_tokenizer(300)
    sampler = Sampler(sampling, vocab_size=300, eos_token_ids=frozenset([2]), tokenizer=tokenizer)
    row = Running(request=Request(id="a", prompt_ids=(1,), max_new_tokens=50, grammar=make_grammar(sampling)))
    while row.finish is None:
        step(sampler, [row], logits_for(tokenizer.encode("a", add_special_tokens=False)[0]), 0)
    assert sampler.reasoning is not None
    assert sampler.reasoning.split(row) == SplitText(reasoning=None, text="ab</think>c")


@pytest.mark.parametrize(("behind", "text"), [(" \n", "no"), (" n", "no"), ("y", None)])
def test_what_the_last_token_of_the_end_tag_holds_of_the_answer_counts(behind: str, text: str | None) -> None:
    tokenizer = byte_level_tokenizer(300)
    tokenizer.add_tokens([f"k>{behind}"])
    sampling = SamplingConfig(reasoning=["<think>", "</think>"], choice=["no", "not"])
    sampler = Sampler(sampling, vocab_size=301, eos_token_ids=frozenset([2]), tokenizer=tokenizer)
    ids = [*tokenizer.encode("<think>a</thin", add_special_tokens=False), 300]
    row = Running(request=Request(id="a", prompt_ids=(1,), max_new_tokens=50, grammar=make_grammar(sampling)))
    while row.finish is None:
        step(sampler, [row], logits_for([*ids, *[2] * 9][len(row.generated)], size=301), 0)
    if text is None:
        assert row.error is not None
        assert row.error.startswith("its grammar cannot be followed at new token")
    else:
        assert sampler.reasoning is not None
        assert sampler.reasoning.split(row) == SplitText(reasoning="a", text=text)


def test_each_row_has_its_own_and_the_others_what_they_get_alone() -> None:
    free = [Prompt(text, id=text, max_new_tokens=60) for text in ("Say", "anything")]
    own = [
        Prompt("a", choice=["yes", "yes please", "no"]),
        Prompt("b", regex="[a-c]{4}"),
        Prompt("c", json_schema=SCHEMA),
    ]
    own += [Prompt("d", grammar='start: "<" /[0-9]+/ ">"', temperature=1.0)]
    runtime = runtime_of()
    one, two, three, four, *others = runtime.generate([*own, *free])
    assert one.text in ("yes", "yes please", "no")
    assert set(two.text) <= set("abc")
    assert len(two.text) == 4
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(three.text))
    assert four.text[0] + four.text[-1] == "<>"
    assert four.text[1:-1].isdigit()
    alone = [runtime.generate([prompt])[0].token_ids for prompt in free]
    assert [other.token_ids for other in others] == alone


def test_a_rows_own_replaces_the_runs_and_samples_differ() -> None:
    runtime = runtime_of(choice=["red", "green"], n=4, temperature=1.0)
    results = runtime.generate(["colour", Prompt("letters", regex="[a-z]{6}")])
    assert {result.text for result in results[:4]} == {"red", "green"}
    assert len({result.text for result in results[4:]}) > 1
    assert all(len(result.text) == 6 for result in results[4:])


def test_log_probabilities_are_those_of_the_model_as_if_nothing_were_masked() -> None:
    runtime = runtime_of(choice=["red", "green"], logprobs=2)
    (result,) = runtime.generate(["colour"])
    assert isinstance(result, Completion)
    ((scored,),) = [runtime.score([(list(result.request.prompt_ids), list(result.token_ids))])]
    assert [token.own for token in result.logprobs] == pytest.approx(list(scored.token_logprobs), abs=1e-4)
    assert any(token.own < max(token.top) for token in result.logprobs), "the mask changed nothing"


@pytest.mark.slow("runtime/test_structured.py::test_each_row_has_its_own_and_the_others_what_they_get_alone")
def test_a_row_that_is_cut_says_so_and_is_the_beginning_of_a_document() -> None:
    long, short = (
        Runtime(model="random", json_schema=SCHEMA, max_new_tokens=n).generate(["x"])[0] for n in (MAX_NEW_TOKENS, 20)
    )
    assert short.finish is FinishReason.length
    assert short.token_ids == long.token_ids[:20]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_stopped_anywhere_a_row_goes_on_in_its_grammar(temperature: float) -> None:
    runtime = runtime_of(json_schema=SCHEMA, temperature=temperature)
    request = runtime.request("a", "An invoice:")
    assert isinstance(request, Request)
    plan = runtime.plan([request])
    with runtime.session(plan) as session:
        ((_, whole),) = session.wave(plan.blocks[0], [0], [request], {})
    for num_passes in (1, 30):
        with runtime.session(plan) as session:
            with pytest.raises(Interrupted):
                list(session.wave(plan.blocks[0], [0], [request], {}, on_pass=stop_behind(num_passes)))
            unfinished = session.snapshot()
        assert len(unfinished[0].token_ids) == num_passes
        with runtime.session(plan) as session:
            ((_, resumed),) = session.wave(plan.blocks[0], [0], [request], unfinished)
        assert resumed.token_ids == whole.token_ids


def stop_behind(num_passes: int) -> Callable[[object], None]:
    done: list[object] = []

    def on_pass(record: object) -> None:
        done.append(record)
        if len(done) == num_passes:
            raise Interrupted("stopped by the test")

    return on_pass


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"regex": "("}, "sampling.regex is refused by llguidance: .*unclosed group"),
        ({"regex": "a(?=b)"}, "sampling.regex is refused by llguidance: .*look-around"),
        ({"json_schema": {"type": "foo"}}, "sampling.json_schema is refused by llguidance: Invalid type: foo"),
        ({"json_schema": '{"type":'}, "sampling.json_schema is not valid JSON"),
        ({"json_schema": "nowhere.json"}, "sampling.json_schema=nowhere.json cannot be read: No such file"),
        ({"grammar": "start: what"}, "sampling.grammar is refused by llguidance"),
        ({"choice": []}, "sampling.choice is empty"),
        ({"choice": ["a", ""]}, "sampling.choice holds an empty string"),
        ({"choice": ["a"], "regex": "b"}, "sampling.regex and sampling.choice exclude each other"),
        ({"choice": ["a"], "ignore_eos": True}, "sampling.ignore_eos=true never ends, sampling.choice must end"),
    ],
    ids=str,
)
def test_what_the_run_asks_is_refused_before_a_model_is_looked_for(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Runtime(model="/no/model/there", **settings)  # pyright: ignore[reportArgumentType]


def test_there_may_be_more_choices_than_a_grammar_has_symbols() -> None:
    choices = {f"{number:05}" for number in range(70_000)}
    (result,) = runtime_of(choice=sorted(choices)).generate(["x"])
    assert result.text in choices


@pytest.mark.parametrize("depth", [200, 2_000, 100_000])
def test_a_schema_too_deep_for_its_reader_is_refused_in_a_file_and_as_text_and_as_an_object(
    depth: int, tmp_path: Path
) -> None:
    text = '{"items":' * depth + "{}" + "}" * depth
    (tmp_path / "deep.json").write_text(text)
    nested: dict[str, object] = {}
    for _ in range(depth):
        nested = {"items": nested}
    for schema in (str(tmp_path / "deep.json"), text, nested):
        with pytest.raises(ConfigError, match=r"sampling\.json_schema is (not valid JSON|refused by llguidance)"):
            Runtime(model="/no/model/there", json_schema=schema)


def test_what_one_row_asks_costs_that_row_alone(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "null"}')
    bad = [Prompt("a", regex="("), Prompt("b", json_schema=str(tmp_path / "schema.json")), Prompt("c", choice=[])]
    *refused, good = runtime_of().generate([*bad, Prompt("d", choice=["fine"])])
    assert all(isinstance(result, Rejected) for result in refused)
    assert [("refused by llguidance" in (r.error or ""), "is not valid JSON" in (r.error or "")) for r in refused] == [
        (True, False), (False, True), (False, False),
    ]  # fmt: skip
    assert good.text == "fine"


def test_a_schema_in_a_file_is_the_schema(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA, indent=2))
    from_file, inline = (
        runtime_of(json_schema=schema) for schema in (str(tmp_path / "schema.json"), json.dumps(SCHEMA))
    )
    assert from_file.config.sampling == inline.config.sampling
    assert json.loads(str(inline.config.sampling.json_schema)) == SCHEMA


def test_a_setting_that_bans_all_that_the_grammar_wants_makes_an_error_row() -> None:
    (result,) = runtime_of(choice=["ab"], min_new_tokens=5).generate(["x"])
    assert result.error is not None
    assert result.error.startswith("every token is banned at new token 2")
    assert "by sampling.min_new_tokens, its grammar" in result.error


def test_tokens_that_are_not_of_the_grammar_make_an_error_row() -> None:
    tokenizer = byte_level_tokenizer(300)
    sampler = Sampler(SamplingConfig(), vocab_size=300, eos_token_ids=frozenset([2]), tokenizer=tokenizer)
    request = Request(id="a", prompt_ids=(1,), max_new_tokens=9, grammar=make_grammar(SamplingConfig(regex="ab")))
    row = Running(request=request, generated=tokenizer.encode("b", add_special_tokens=False))
    step(sampler, [row], torch.zeros(1, 300), 1)
    assert row.finish is FinishReason.error
    assert row.error is not None
    assert row.error.startswith("its grammar cannot be followed at new token 1 (pass 1)")


def walk(tokenizer: PreTrainedTokenizerBase, vocab_size: int, sampling: SamplingConfig) -> Iterator[int]:
    """Tokens that the masks allow, drawn evenly."""
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int)
    grammars, generator = Grammars(tokenizer, vocab_size, frozenset([eos])), np.random.default_rng(0)
    row = Running(request=Request(id="a", prompt_ids=(1,), max_new_tokens=999, grammar=make_grammar(sampling)))
    while not row.generated or row.generated[-1] != eos:
        masks_BW = grammars.masks([row])
        assert masks_BW is not None
        bits = np.unpackbits(masks_BW.numpy().view(np.uint8), bitorder="little")
        row.generated.append(int(generator.choice(np.flatnonzero(bits[:vocab_size]))))
        yield row.generated[-1]


def test_masks_are_computed_beside_the_pass_and_are_those_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed ahead is what would be computed when logits have come, also of rows that came or went."""
    threads: list[str] = []

    def noted(executor: Any, guides: Any, vocab_size: int) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return fill_masks(executor, guides, vocab_size)

    monkeypatch.setattr(grammar, "fill_masks", noted)
    tokenizer, made = byte_level_tokenizer(300), make_grammar(SamplingConfig(regex="[ab]{4}c"))
    ahead, plain = (Grammars(tokenizer, 300, frozenset([2])) for _ in range(2))

    def rows() -> list[Running]:
        return [Running(request=Request(id="a", prompt_ids=(1,), max_new_tokens=9, grammar=made)) for _ in range(3)]

    given, others = rows(), rows()
    for text in "abba":
        token = tokenizer.encode(text, add_special_tokens=False)
        for row in (*given, *others):
            row.generated += token
        ahead.start_masks(given[:2])
        found, expected = ahead.masks(given), plain.masks(others)
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
    assert sum(name.startswith("masks") for name in threads) == 4


def test_a_sentencepiece_tokenizer_with_merges_and_byte_fallback_is_followed(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    if not MIXTRAL_TOKENIZER.exists():
        pytest.skip("needs Mixtral's tokenizer")
    load_local_tokenizer(MIXTRAL_TOKENIZER).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for name in ("weather call", "invoice", "extracted entities"):
        ids = list(walk(tokenizer, 32000, SamplingConfig(json_schema=SCHEMAS[name])))
        document = json.loads(tokenizer.decode(ids, skip_special_tokens=True))
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(document)


CHOICES = ["    return 1", " yes", "yes", "  x\n  y", " déjà vu", "京都 €"]
SPELLED_OUT: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "one choice": ({"choice": [" yes"]}, lambda text: text == " yes"),
    "regex": ({"regex": " {2}[a-c]{3}\\.?"}, lambda text: re.fullmatch(" {2}[a-c]{3}\\.?", text)),
    "schema": ({"json_schema": {"enum": [" a", "b  "]}}, lambda text: json.loads(text) in (" a", "b  ")),
}


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("kind", ["llama2", "t5"])
def test_a_run_gives_a_choice_with_its_spaces_and_prompt_and_completion_are_the_text_of_both(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.save_pretrained(tmp_path)
    texts = ["def f():\n", "The answer is", "yes,"]
    asked = [*(Prompt(text, choice=["    return 1"]) for text in texts), *(Prompt(text) for text in texts)]
    results = Runtime(model="random", tokenizer=str(tmp_path), max_new_tokens=40).generate(asked)
    assert [result.text for result in results[:3]] == ["    return 1"] * 3
    for result in results:
        assert isinstance(result, Completion), result
        prompt, new = list(result.request.prompt_ids), list(result.token_ids)
        before, both = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *new]))
        assert before + result.text == both
    assert any(result.text != tokenizer.decode(list(result.token_ids), skip_special_tokens=True) for result in results)


# WordPiece has no words of several spaces, or for quotes beside letters.
SPELLABLE = [(kind, name) for kind in EVEN for name in SPELLED_OUT if kind != "wordpiece" or name == "one choice"]


@pytest.mark.dealt(most=14)
@pytest.mark.parametrize(("kind", "structure"), SPELLABLE)
def test_text_comes_out_as_it_was_asked_with_every_kind_of_tokenizer(kind: str, structure: str) -> None:
    """Leading spaces included, behind a text and where one begins. A grammar's tokens are those of a random model."""
    tokenizer, (settings, fits) = tokenizer_of(kind), SPELLED_OUT[structure]
    sampling = SamplingConfig(**settings)
    sampler = Sampler(sampling, vocab_size=len(tokenizer), eos_token_ids=frozenset([EOS_ID]), tokenizer=tokenizer)
    grammar, detokenizer, generator = make_grammar(sampling), Detokenizer(tokenizer), torch.Generator().manual_seed(1)
    prompts = [tuple(tokenizer("The answer is")["input_ids"]), (1,)]
    found = set[str]()
    for number in range(40):
        request = Request(id="0", prompt_ids=prompts[number % 2], max_new_tokens=99, grammar=grammar)
        row = Running(request=request)
        while row.finish is None:
            step(sampler, [row], torch.randn(1, len(tokenizer), generator=generator), 0)
        assert row.finish is FinishReason.eos, row.error
        text = detokenizer.completion_text(request, row.generated)
        assert fits(text), text
        found.add(text)
    assert len(found) > 1 or structure == "one choice"


def test_a_tokenizer_that_cannot_be_followed_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="does not support this model's tokenizer str: Only fast tokenizers"):
        llguidance_tokenizer("slow", 300, frozenset([2]))  # pyright: ignore[reportArgumentType]
    ends = tokenizers.Tokenizer(tokenizers.models.BPE({"a</w>": 0, "a": 1, "b": 2}, []))
    ends.decoder = tokenizers.decoders.BPEDecoder()  # where a space stands depends on what follows
    with pytest.raises(ConfigError, match="can't determine decoder type"):
        llguidance_tokenizer(PreTrainedTokenizerFast(tokenizer_object=ends), 3, frozenset([2]))
    with pytest.raises(ConfigError, match=r"needs a tokenizer: set model\.tokenizer"):
        llguidance_tokenizer(None, 300, frozenset([2]))
    with pytest.raises(ConfigError, match="the model's config has none"):
        llguidance_tokenizer(byte_level_tokenizer(300), 300, frozenset())
