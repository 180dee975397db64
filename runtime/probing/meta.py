"""Builds a model without weights: parameters are on the meta device, buffers have their values.

Also finds loaded weights that the class's own initialization overwrites. After loading, `from_pretrained` initializes
the tensors that are not marked as loaded. But the mark does not apply to views: Youtu zeroes the padding token's row of
the loaded embeddings."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from ..errors import CheckpointError, ConfigError
from ..units import GIB, format_bytes
from .heads import AUTO, Head, encoder_class, saved_head

_SMALL_NUMEL = 1 << 18  # smaller tensors are treated as constants, not weights
_FILLED = (torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)  # functions that may create weights
_SIZE_LIMITED = (*_FILLED, torch.arange, torch.linspace, torch.eye)
# Names of functions of torch and transformers that set initial values.
_FILL_IN_PLACE = frozenset(("normal_", "uniform_", "kaiming_uniform_", "constant_", "zero_", "fill_"))
MARK = "_is_hf_initialized"  # the attribute by which transformers marks parameters and modules as loaded
MAX_BUFFER_BYTES = GIB  # limit of one buffer; attention masks, as of GPT-2, take a few MiB


class _WeightsOnMeta(TorchFunctionMode):
    """A torch mode that puts weights on the meta device while a model is built.

    Weights are the tensors of `torch.empty`, and large tensors of `torch.zeros`, `torch.ones` and so on. Other tensors
    (`arange`, small constants) and buffers computed from them keep their values. Initial values of weights are not
    computed. Raises CheckpointError if there are more than `max_tensors` calls of `torch.empty`, or if a buffer
    exceeds `MAX_BUFFER_BYTES`."""

    def __init__(self, max_tensors: int | None):
        super().__init__()
        self._max_tensors, self._num_tensors = max_tensors, 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func.__name__ in _FILL_IN_PLACE:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, torch.Tensor) and filled.is_meta:
                return filled
        if kwargs.get("device") is None:
            if func is torch.empty:
                self._num_tensors += 1
                if self._max_tensors is not None and self._num_tensors > self._max_tensors:
                    raise CheckpointError(
                        f"config.json needs more than {self._max_tensors:,} weights; the checkpoint has far fewer"
                    )
                kwargs["device"] = "meta"
            elif func in _SIZE_LIMITED:
                on_meta = func(*args, **(kwargs | {"device": "meta"}))
                if isinstance(on_meta, torch.Tensor) and on_meta.numel() >= _SMALL_NUMEL and func in _FILLED:
                    return on_meta
                if isinstance(on_meta, torch.Tensor) and on_meta.nbytes > MAX_BUFFER_BYTES:
                    raise CheckpointError(
                        f"config.json needs a buffer of {format_bytes(on_meta.nbytes)} that is not a weight; the limit "
                        f"is {format_bytes(MAX_BUFFER_BYTES)}"
                    )
        return func(*args, **kwargs)


def auto_class(config: PreTrainedConfig, *, encodes: bool = False) -> type[_BaseAutoModelClass]:
    """Chooses transformers' auto class for this config.

    For a model that generates text, this is the class for causal, multimodal or encoder-decoder models. For another
    model, it is the class for its head. `encodes`: load only the encoder of an encoder-decoder. Raises ConfigError if
    there is no class."""
    encoder, head = encoder_class(config), saved_head(config)
    if encoder is not None and (head is Head.none or (encodes and config.is_encoder_decoder)):
        return AutoModelForTextEncoding
    if head is not Head.text:
        return AUTO[head]
    first = [AutoModelForSeq2SeqLM] if config.is_encoder_decoder else [AutoModelForCausalLM]
    for auto in (*first, AutoModelForMultimodalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM):
        if type(config) in auto._model_mapping:
            return auto
    raise ConfigError(
        f"model.path: transformers {transformers.__version__} has no text generation for model type "
        f"{config.model_type}; use another checkpoint"
    )


def build_meta_model(
    config: PreTrainedConfig, dtype: torch.dtype, *, max_tensors: int | None = None, encodes: bool = False
) -> PreTrainedModel:
    """Builds the language model of `config`, in eval mode. Parameters are on the meta device; buffers have their values
    and are on the CPU.

    Parameters and buffers have the dtypes that `from_pretrained(dtype=dtype)` gives them: some classes keep some in
    float32. Tied parameters are one object. `config` is not changed. `max_tensors`: limit for the number of weights.
    `encodes` and ConfigError: see `auto_class`."""
    auto, config = auto_class(config, encodes=encodes), copy.deepcopy(config)
    if auto is AutoModelForTextEncoding:
        config.is_encoder_decoder = False
    with _WeightsOnMeta(max_tensors):
        model = auto.from_config(config, dtype=dtype)
    meta_parameters: dict[nn.Parameter, nn.Parameter] = {}  # original -> meta; tied parameters stay one object
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in meta_parameters:
                meta_parameters[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            setattr(module, name, meta_parameters[parameter])
    # Buffers on meta are filled by the class's own initialization, as in from_pretrained.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
                setattr(module, MARK, False)
    model.initialize_weights()
    # Name patterns of tensors that from_pretrained keeps in float32.
    patterns: set[str] = set()
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(model._keep_in_fp32_modules_strict or ())
    matches = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns)).search
    for name, tensor in (*model.named_parameters(), *model.named_buffers()) if patterns else ():
        if tensor.is_floating_point() and matches(name):
            tensor.data = tensor.data.float()
    return model.eval()


def untie_head(model: PreTrainedModel) -> None:
    """Gives the head its own weights, for checkpoints that contain them although the class ties them to the embeddings,
    such as T5 1.1. Mutates `model`."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embeddings.weight:
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
        for name in [name for name in model.all_tied_weights_keys if model.get_parameter(name) is head.weight]:
            del model.all_tied_weights_keys[name]
        model.config.tie_word_embeddings = False


class _ParameterWrites(TorchDispatchMode):
    """A torch mode that records in-place operations on a model's parameters, also through views."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        # A view has the storage of its parameter; `_cdata` identifies the storage.
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in model.named_parameters()}
        self.writes = list[tuple[str, str, torch.Tensor]]()  # (parameter name, operation, tensor written to)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, torch.Tensor) and target.is_meta:
            name = self._names.get(target.untyped_storage()._cdata)
            if name is not None:
                self.writes.append((name, func._schema.name.partition("::")[2], target))
        return func(*args, **(kwargs or {}))


def initialize_again(model: PreTrainedModel) -> None:
    """Runs the class's initialization as `from_pretrained` does after loading. All parameters and saved buffers are
    marked as loaded; other buffers are computed again. Mutates `model`."""
    for tensor in model.state_dict(keep_vars=True).values():
        setattr(tensor, MARK, True)
    for module in model.modules():
        setattr(module, MARK, not module._parameters)  # a marked module is skipped
    model.initialize_weights()


def zeroed_rows(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Finds rows that `from_pretrained` zeroes after loading: parameter name -> row numbers. Parameters of `model` must
    be on the meta device. Calls `initialize_again`, which mutates `model`. Raises ConfigError if the class overwrites
    other weights than whole rows."""
    with _ParameterWrites(model) as writes:
        initialize_again(model)
    rows: dict[str, tuple[int, ...]] = {}
    for name, operation, target in writes.writes:
        width = model.get_parameter(name).shape[-1]
        if operation != "zero_" or target.shape != (width,) or target.stride() != (1,):
            raise ConfigError(
                f"model.path: {type(model).__name__} overwrites loaded weights ({operation} of {tuple(target.shape)} "
                f"numbers of {name!r}), which is not supported: use transformers itself"
            )
        rows[name] = (*rows.get(name, ()), target.storage_offset() // width)
    return rows
