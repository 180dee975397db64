"""A tiny config of any model type: transformers' default config with its sizes made small, its kinds of layer kept."""

from collections.abc import Mapping

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

from runtime.model.families import FAMILIES
from tests.tiny_config_values import OVERRIDES, SIZES, VARIANTS, VISION_SIZES

NUM_LAYERS = 4
_TEXT_PARTS = frozenset({"text_config", "decoder", "encoder", "language_config", "thinker_config"})
_NULL_MEANS_ABSENT = frozenset(  # where the default is None, the class goes another way with a number
    {
        "q_lora_rank", "kv_lora_rank", "sliding_window", "head_dim", "n_shared_experts", "num_experts",
        "num_local_experts", "moe_intermediate_size", "intermediate_size", "ffn_hidden_size",
    }
)  # fmt: skip
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_config(name: str) -> PreTrainedConfig:
    """`name`: a model type, or one with a variant behind it. Raises whatever transformers raises where no such config
    can be."""
    model_type = name.split(" ")[0]
    return _text(CONFIG_MAPPING[model_type], {**_overrides(model_type), **VARIANTS.get(name, {})})


def _overrides(model_type: str) -> Mapping[str, object]:
    """Those of the proven family, if there is one, and our own."""
    proven = next((family.overrides for family in FAMILIES.values() if family.model_type == model_type), {})
    return {**proven, **OVERRIDES.get(model_type, {})}


def _text(cls: type[PreTrainedConfig], overrides: Mapping[str, object]) -> PreTrainedConfig:
    base = cls()
    sizes = {**_sizes_of(cls, base, SIZES), **_TOKEN_IDS}
    if isinstance(sizes.get("kv_lora_rank"), int):  # latents: all heads have keys of their own
        sizes.pop("head_dim", None)
        sizes |= {"num_key_value_heads": SIZES["num_attention_heads"]} if "num_key_value_heads" in sizes else {}
    sizes |= {name: value for name, value in overrides.items() if value is not None}
    for name in [name for name, value in overrides.items() if value is None]:
        sizes.pop(name, None)
    num_layers = sizes.get("num_hidden_layers", NUM_LAYERS)
    for name in ("layer_types", "mlp_layer_types"):
        is_own = name not in cls.attribute_map and not isinstance(getattr(cls, name, None), property)
        kinds = getattr(base, name, None) if is_own else None
        if name not in overrides and isinstance(kinds, list | tuple) and kinds:
            sizes[name] = _pattern(list(kinds), int(str(num_layers)), first_alone=name == "mlp_layer_types")
    for name, part in getattr(cls, "sub_configs", {}).items():
        sizes.setdefault(name, _part(base, name, part))
    return cls(**sizes)


def _part(base: PreTrainedConfig, name: str, part: type[PreTrainedConfig]) -> Mapping[str, object] | None:
    """A nested config: of text, or of what is not asked for here."""
    value = getattr(base, name, None)
    if value is None or not hasattr(value, "to_dict"):
        return None
    if name in _TEXT_PARTS:
        return _text(type(value), _overrides(value.model_type)).to_dict()
    return type(value)(**_sizes_of(type(value), value, VISION_SIZES)).to_dict()


def _sizes_of(cls: type[PreTrainedConfig], base: PreTrainedConfig, sizes: Mapping[str, object]) -> dict[str, object]:
    """Those that a class knows under their own names, and that its default config sets to a single number."""
    derived = {name for name in sizes if isinstance(getattr(cls, name, None), property)}
    known = {name for name in sizes if name in base.to_dict() or hasattr(cls, name) or name in vars(base)}
    return {name: sizes[name] for name in known - derived - set(cls.attribute_map) if _is_number(base, name)}


def _is_number(base: PreTrainedConfig, name: str) -> bool:
    try:
        value = getattr(base, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return True  # one for each layer
    if value is None:
        return name not in _NULL_MEANS_ABSENT
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pattern(kinds: list[object], num_layers: int, *, first_alone: bool) -> list[object]:
    """Each kind in turn. `first_alone`: the first layer keeps its kind, which later ones may not have."""
    unique = list(dict.fromkeys(map(str, kinds)))
    if first_alone:
        return [unique[0], *(unique[index % len(unique)] for index in range(1, num_layers))]
    return [unique[index % len(unique)] for index in range(num_layers)]
