"""A prompt's own settings hold for it alone, and what is no prompt is refused with its place."""

import typing
from collections.abc import Callable

import pytest
import torch

from jobs.config.typed import field_types
from runtime import Completion, DType, Prompt, Runtime, RuntimeConfig, SamplingConfig, Settings
from runtime.config.texts import TextField
from runtime.errors import ConfigError
from runtime.library.keywords import apply_settings, setting_groups
from runtime.sequences.sequence import Request
from tests.runtime.sampling_support import References, runtime_for, transformers_answer
from tests.support import transformers_model


def test_a_prompt_is_generated_from_as_it_says_whatever_its_neighbours_say(reference: References) -> None:
    """A seed of its own gives what transformers gives after `torch.manual_seed`."""
    ref = reference("llama")
    runtime = runtime_for(ref, SamplingConfig(max_new_tokens=7, ignore_eos=True))
    plain, warm = ref.prompts[0], SamplingConfig(temperature=1.3, max_new_tokens=7, ignore_eos=True)
    found = runtime.generate(
        [
            plain,
            Prompt(token_ids=plain, max_new_tokens=3),
            Prompt(token_ids=ref.prompts[1], temperature=1.3, seed=7),
            Prompt(token_ids=plain, temperature=1.3, seed=7, id="other"),
            Prompt(token_ids=plain, max_new_tokens=-1),
        ]
    )
    model = transformers_model(ref.directory)
    assert list(found[0].token_ids) == ref.expected[0]
    assert list(found[1].token_ids) == ref.expected[0][:3]
    assert list(found[2].token_ids) == transformers_answer(model, ref.prompts[1], 7, warm)
    assert list(found[3].token_ids) == transformers_answer(model, plain, 7, warm)
    assert [each.id for each in found] == ["0", "1", "2", "other", "4"]
    assert found[4].error is not None
    assert "max_new_tokens" in found[4].error


def test_samples_of_one_seed_differ_and_the_first_is_the_seeds_own() -> None:
    asked = [
        Request(id=id, prompt_ids=(1,), max_new_tokens=1, sample_index=sample, own_seed=5)
        for id, sample in (("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2))
    ]
    seeds = [request.seed(0) for request in asked]
    assert (seeds[0], seeds[1], seeds[2]) == (5, 5, seeds[3])
    assert len(set(seeds)) == 3
    torch.Generator().manual_seed(max(seeds))


def test_messages_become_what_the_models_own_template_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, chat = Runtime(max_new_tokens=1), [{"role": "user", "content": "Hello"}]
    tokenizer = runtime.model.tokenizer
    assert tokenizer is not None
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    [of_messages, of_nothing, of_text] = runtime.generate([chat, Prompt(messages=[]), "Hello"])
    assert isinstance(of_messages, Completion)
    assert of_messages.request.prompt_ids == runtime.tokenize([text], is_rendered=True)[0]
    assert of_messages.num_prompt_tokens > of_text.num_prompt_tokens
    assert of_nothing.error == "the model's chat template refuses the messages: there are no messages"
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="the model's tokenizer has no chat template: use texts"):
        runtime.generate([chat])


def test_token_ids_of_other_libraries_are_prompts_too() -> None:
    assert Prompt.from_value(torch.tensor([3, 4]), 0) == Prompt(token_ids=[3, 4])  # pyright: ignore
    assert Prompt.from_value(({"role": "user", "content": "x"},), 0).messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Prompt(), "a prompt must have one of text, messages and token_ids, got none"),
        (lambda: Prompt("a", token_ids=[1]), "got text and token_ids"),
        (lambda: Prompt(["a"]), "a prompt's text must be a str"),  # pyright: ignore
        (lambda: Prompt("a", max_new_tokens=1.5), "a prompt's max_new_tokens must be a whole number"),  # pyright: ignore
        (lambda: Prompt("a", seed=-1), "a prompt's seed must be 0 to"),
        (lambda: Prompt("a", temperature="hot"), "a prompt's temperature must be a number"),  # pyright: ignore
        (lambda: Prompt.from_value(3.5, 4), "prompt 4 must be a text, a list of token ids, a list of messages"),
        (lambda: Prompt.from_value([1, "a"], 4), "prompt 4 must be"),  # pyright: ignore
        (lambda: Prompt.from_value({"role": "user"}, 4), "prompt 4 must be"),  # pyright: ignore
        (lambda: Runtime().generate([Prompt("a", id="1"), "b"]), "prompts 0 and 1 have the same id '1'"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)


def test_settings_are_the_groups_and_every_key_that_one_group_alone_has() -> None:
    """Each with its key's type, and a text where the key takes one."""
    groups, told = field_types(RuntimeConfig), typing.get_type_hints(Settings)
    assert told.keys() == {*groups, *setting_groups()}
    assert {"host_memory_gib", "max_new_tokens", "dtype", "num_threads"} < told.keys()
    assert not {"tier", "kind", "name", "device"} & told.keys()
    for name, group in setting_groups().items():
        held, raw = field_types(groups[group])[name], typing.get_type_hints(groups[group])[name]
        takes_text = typing.get_origin(raw) is TextField
        assert told[name] == (held | str if takes_text else held), name  # pyright: ignore


def test_settings_change_the_config_that_is_given_and_nothing_else_of_it() -> None:
    given = RuntimeConfig(offload="cpu", sampling=SamplingConfig(seed=3))
    found = apply_settings(given, {"host_memory_gib": 2.0, "dtype": "bfloat16", "temperature": 1.0})
    assert (found.offload.tier, found.offload.host_memory_gib) == (given.offload.tier, 2.0)
    assert (found.model.dtype, found.sampling) == (DType.bfloat16, SamplingConfig(seed=3, temperature=1.0))
    assert apply_settings(given, {}) == given
    both = apply_settings(None, {"offload": "nvme", "resident_layers": 2})
    assert (both.offload.tier.name, both.offload.resident_layers) == ("nvme", 2)
    for name, said in [("host_memory_gb", "did you mean host_memory_gib?"), ("qqq", "Runtime has no setting qqq")]:
        with pytest.raises(ConfigError) as caught:
            apply_settings(None, {name: 1})
        assert said in str(caught.value)
