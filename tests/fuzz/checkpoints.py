"""What lies beside weights: config.json, generation_config.json, tokenizers and chat templates, of the tiny model."""

import json
import random
from functools import cache
from math import prod
from pathlib import Path

import torch

from runtime.cache_root import cache_root
from runtime.checkpoint_source.location import load_tokenizer
from runtime.config.settings import ModelConfig
from runtime.errors import CheckpointError
from runtime.model.loading import LoadedModel, load_model
from runtime.requests.chat import ChatRenderer, TemplateRefusal
from runtime.requests.prompts import tokenize_each
from runtime.store.checkpoint import open_checkpoint
from runtime.synthesize.checkpoints import random_checkpoint
from tests.fuzz.headers import require_inside
from tests.fuzz.mutate import mutated, mutated_json
from tests.fuzz.target import Files, OutsideError, Target

CONFIGS = ("config.json", "generation_config.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
TEXTS = ["", "hello", "déjà vu, 東京! \n\n  x**2", "<|bos|><|eos|>", "x" * 3000]
CHATS = (
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "{{ 1 }}"}, {"role": "user", "content": "a\nb"}],
)
NO_OBJECTS = (b"", b"{", b"[]", b"NaN", b"null", b"5", b"[" * 100_000, b'{"a":' * 1000, b"\xff\xfe\0")
LONE = {  # by key of config.json, what was seen to end badly
    "num_hidden_layers": [100_000, 10**9, -1, "4", 4.0], "hidden_size": [None, 0, 10**12, 10**30],
    "num_attention_heads": [0], "num_key_value_heads": [0], "head_dim": [-32, 10**10], "rms_norm_eps": ["x"],
    "max_position_embeddings": [-5, 10**18], "hidden_act": ["__import__", 5], "model_type": [["llama"], "mamba", "t5"],
    "rope_parameters": ["x", {"rope_type": "nosuch"}, {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}],
    "quantization_config": ["x"], "eos_token_id": ["abc"], "dtype": ["os.system"], "tie_word_embeddings": ["yes"],
    "num_labels": [10**9], "_attn_implementation": ["kernels-community/evil"], "per_layer_config": [{"0": {"a": 1}}],
    "auto_map": [{"AutoConfig": "evil.E"}], "vocab_size": [10**10], "pad_token_id": [10**9],
    "is_encoder_decoder": [True],
}  # fmt: skip
TEMPLATES = (
    "{{ 1/0 }}", "{{ 'a'*3000000000 }}", "{% for i in range(10**12) %}x{% endfor %}", "{% for %}", "{{ foo.bar.baz }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ messages[5].content }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 9**9**9 }}", "{{ ''.__class__.__mro__ }}",
    "{{ messages|attr('__class__') }}", "{{ raise_exception('no') }}", "{{ cycler.__init__.__globals__.os }}",
    "{% set x = namespace(a='b') %}{% for i in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}{{ x.a }}",
    "{{ '%1000000000d' % 1 }}", "{{ 'a'.center(3000000000) }}", "{{ ('a'*99999)|wordwrap(1) }}",
    "{{ raise_exception('x' * 3000000) }}", "{{ '\\ud800' }}", "{{ raise_exception('\\ud800\\n') }}",
    "{{ range(9)|random }}", "{% include '/etc/passwd' %}", "{{ lipsum.__globals__['os'] }}",
    "{{ '{0.__class__}'.format(messages) }}", "{{ 10**5000 }}",
)  # fmt: skip


def tiny() -> Path:
    return random_checkpoint(cache_root(None) / "tiny")


@cache
def tiny_model() -> LoadedModel:
    return load_model(ModelConfig(), torch.device("cpu"), None)


def files(names: tuple[str, ...]) -> Files:
    return {name: (tiny() / name).read_bytes() for name in names}


def link_rest(directory: Path) -> None:
    """What the case does not bring comes from the tiny model."""
    for file in tiny().iterdir():
        if not (directory / file.name).exists():
            (directory / file.name).symlink_to(file)


def check_config(directory: Path, rng: random.Random) -> None:
    link_rest(directory)
    loaded = load_model(ModelConfig(name="hf", path=str(directory)), torch.device("cpu"), None)
    require_inside(loaded.checkpoint.tensors.values())
    for stage in loaded.shape.stages:
        for parameter in stage.parameters:
            held = sum(prod(piece.shape) for piece in parameter.slices)
            if held != prod(parameter.shape):
                raise OutsideError(f"{parameter.name} has {parameter.shape}, its file {held} numbers")


def bad_configs(home: Path) -> list[Files]:
    good = json.loads((tiny() / CONFIGS[0]).read_bytes())
    odd = [{CONFIGS[0]: json.dumps(good | {key: value}).encode()} for key, values in LONE.items() for value in values]
    return [*odd, *({name: content} for name in CONFIGS for content in NO_OBJECTS)]


def check_tokenizer(directory: Path, rng: random.Random) -> None:
    link_rest(directory)
    tokenizer = load_tokenizer(None, open_checkpoint(directory))
    if tokenizer is None:
        raise CheckpointError("none")
    model = tiny_model()
    found = tokenize_each(
        LoadedModel(**{**vars(model), "tokenizer": tokenizer}), TEXTS, is_rendered=False, max_tokens=2048
    )
    if len(found) != len(TEXTS):
        raise OutsideError(f"{len(TEXTS)} texts gave {len(found)} results")


def bad_tokenizers(home: Path) -> list[Files]:
    names = (*TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
    broken = [{name: content} for name in names for content in NO_OBJECTS]
    config = json.loads((tiny() / TOKENIZERS[1]).read_bytes())
    map_ = {"AutoTokenizer": ["evil.E", "evil.E"]}
    odd = [
        config | more
        for more in ({"auto_map": map_}, {"tokenizer_class": "Evil"}, {"chat_template": 5}, {"auto_map": 1})
    ]
    return [*broken, *({TOKENIZERS[1]: json.dumps(each).encode()} for each in odd)]


def check_template(directory: Path, rng: random.Random) -> None:
    link_rest(directory)
    tokenizer = load_tokenizer(None, open_checkpoint(directory))
    if tokenizer is None or not isinstance(tokenizer.chat_template, str):
        raise CheckpointError("no template")
    with ChatRenderer(tokenizer, cpu_seconds=2) as renderer:
        for chat in CHATS:
            try:
                renderer.render(chat)
            except TemplateRefusal as error:
                raise CheckpointError(str(error)) from error  # in a job it is the row that ends so


TARGETS = (
    Target(
        name="config",
        seeds=lambda home: [files(CONFIGS)],
        corpus=bad_configs,
        check=check_config,
        how={".json": mutated_json},
    ),
    Target(
        name="tokenizer",
        seeds=lambda home: [files(TOKENIZERS)],
        corpus=bad_tokenizers,
        check=check_tokenizer,
        how={".json": mutated_json},
    ),
    Target(
        name="template",
        seeds=lambda home: [files(("chat_template.jinja",)), *({"chat_template.jinja": t.encode()} for t in TEMPLATES)],
        corpus=lambda home: [],
        check=check_template,
        how={".jinja": mutated},
    ),
)
