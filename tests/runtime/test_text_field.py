"""A config takes text for its enums and groups, as the command line does, and refuses what it does not know."""

import copy
import pickle
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum

import pytest

import runtime
from runtime import (
    KVConfig,
    ModelConfig,
    OffloadConfig,
    Order,
    PolicyConfig,
    PrefetchConfig,
    RuntimeConfig,
    Tier,
)
from runtime.config.texts import TextField
from runtime.errors import ConfigError

GROUPS = [hint for hint in typing.get_type_hints(RuntimeConfig).values() if is_dataclass(hint)] + [
    typing.get_args(hint)[0]
    for hint in typing.get_type_hints(RuntimeConfig).values()
    if typing.get_origin(hint) is TextField
]


def enum_of(hint: object) -> type[Enum] | None:
    kinds = [*typing.get_args(hint), *(inner for each in typing.get_args(hint) for inner in typing.get_args(each))]
    return next((kind for kind in [hint, *kinds] if isinstance(kind, type) and issubclass(kind, Enum)), None)


ENUMS = [
    (group, name, kind)
    for group in GROUPS
    for name, hint in typing.get_type_hints(group).items()
    if (kind := enum_of(hint))
]


@pytest.mark.parametrize(("group", "name", "kind"), ENUMS, ids=lambda each: getattr(each, "__name__", each))
def test_every_enum_of_the_config_may_be_given_by_its_name_and_is_exported(
    group: type, name: str, kind: type[Enum]
) -> None:
    assert len(ENUMS) >= 12
    assert getattr(runtime, kind.__name__) is kind
    for member in kind:
        if member is not Order.cgopipe:  # which wants attention on the CPU
            assert getattr(group(**{name: member.name}), name) is member
    with pytest.raises(ConfigError, match=f"{name} must be one of {', '.join(kind.__members__)}, got '-'$"):
        group(**{name: "-"})


NVMEE = f"offload.tier must be one of {', '.join(Tier.__members__)}, got 'nvmee': did you mean nvme?"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OffloadConfig(tier="nvmee"), NVMEE),
        (lambda: PolicyConfig(schedule="zigzg"), "got 'zigzg': did you mean zigzag?"),
        (lambda: OffloadConfig(tier="NVME"), "got 'NVME': did you mean nvme?"),
        (lambda: RuntimeConfig(offload="nvmee"), "got 'nvmee': did you mean nvme?"),
        (lambda: OffloadConfig(tier=3), "offload.tier must be a string or Tier, got 3"),  # pyright: ignore
        (lambda: OffloadConfig(tier=None), "offload.tier must be a string or Tier, got None"),  # pyright: ignore
        (lambda: PolicyConfig(schedule=3), "policy.schedule must be a string or Order or None, got 3"),  # pyright: ignore
        (lambda: RuntimeConfig(model=Tier.cpu), "model must be a string or ModelConfig, got"),  # pyright: ignore
        (lambda: RuntimeConfig(model=" "), "model is empty"),
    ],
)  # fmt: skip
def test_what_is_no_member_is_refused_with_its_key_and_the_nearest(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)


def test_a_text_for_a_group_is_what_it_is_on_the_command_line() -> None:
    by_text = RuntimeConfig(model="/data/llama-3", offload="nvme", kv="cpu", prefetch="block", policy="fixed")
    assert by_text == RuntimeConfig(
        model=ModelConfig(name="llama-3", path="/data/llama-3"),
        offload=OffloadConfig(tier="nvme"),
        kv=KVConfig(tier="cpu"),
        prefetch=PrefetchConfig(kind="block"),
        policy=PolicyConfig(kind="fixed"),
    )
    assert RuntimeConfig(model="tiny") == RuntimeConfig()
    assert RuntimeConfig(model="Qwen/Qwen3-4B").model.path == "Qwen/Qwen3-4B"


def test_a_config_with_such_fields_is_a_dataclass_like_any_other() -> None:
    config = RuntimeConfig(offload="nvme", policy=PolicyConfig(schedule="flexgen"))
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config)):
        assert same == config
        assert hash(same.offload) == hash(config.offload)
    assert "tier=<Tier.nvme: 'nvme'>" in repr(config)
    assert next(field.default for field in fields(OffloadConfig)) is OffloadConfig().tier is Tier.auto
    with pytest.raises(AttributeError):
        config.offload.tier = Tier.cpu  # pyright: ignore
    assert config.offload.tier is Tier.nvme
