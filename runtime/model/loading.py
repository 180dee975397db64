"""Loads a model without its weights: opens a checkpoint, maps its bytes to parameters, stages the model."""

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..cache.paged import HeadShare
from ..cache_root import cache_root
from ..checkpoint_source.download import as_checkpoint_error, as_config_error
from ..checkpoint_source.generation_config import GenerationDefaults, read_generation
from ..checkpoint_source.location import find_checkpoint, load_tokenizer, read_config
from ..config.profiles import BackendTable
from ..config.settings import ANY, DType, Lanes, ModelConfig, Verify
from ..errors import CheckpointError, ConfigError
from ..formats.kinds.rounded import Rounding
from ..formats.module_tensors import METHOD, read_relative_error
from ..formats.registry import LOSSES, pair_companions
from ..kernels.compiler import can_compile
from ..plan.shape.dtypes import WeightStorage, resolve_auto_dtype
from ..plan.shape.model import ModelShape
from ..plan.shape.shapes import Parameter, Stage
from ..probing.guards import NO_DECODER
from ..probing.heads import Head, looks_ahead, model_head
from ..probing.meta import build_meta_model, zeroed_rows
from ..probing.padded_probe import PaddingBehavior, probe_padding
from ..store.checkpoint import Checkpoint, open_checkpoint
from ..store.file_digests import check_packed, digest_files
from ..store.reader import Fill
from ..stream.device import ComputeDevice, has_bfloat16_units
from ..weights.conversions import Conversion, convert_once, make_zeroing
from ..weights.gguf_layout import map_gguf
from ..weights.layout import init_computed_parameters, map_weights, pop_quantization_config
from ..weights.rounding_files import RoundedTensors
from ..weights.stage_weights import load_tensor, stage_weights
from . import attention, experts
from .capabilities import (
    CacheShape,
    ExpertKind,
    choose_lanes,
    encoder_cache_shape,
    expert_kind,
    make_shape,
    measure_cache,
)
from .fused import fuse
from .fused_ops import DTYPES, compiled_ops, host_ops, require_accelerator
from .rope_lengths import RopeLengths, follow_lengths
from .stages import StagedModel, stage_model
from .truncated_model import TruncatedModel, drop_unused_modules

log = logging.getLogger(__name__)

STORED_DTYPES = frozenset(dtype.value for dtype in DType if dtype is not DType.auto)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A staged model and its checkpoint. `dtypes`: compute dtype by full parameter name; `config`: the checkpoint's
    config, including quantization; `digests`: with model.verify=full, the SHA-256 of each weight file by path."""

    staged: StagedModel
    shape: ModelShape
    dtypes: Mapping[str, torch.dtype]
    compute_dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase | None
    generation: GenerationDefaults
    eos_token_ids: frozenset[int]
    start_token_id: int | None  # a decoder's first token behind an encoder; None without one
    checkpoint: Checkpoint
    config: Mapping[str, object]
    fingerprint: str
    digests: Mapping[str, str]
    expands_latents: bool  # see traits.CacheShape
    padding: PaddingBehavior  # of a decoder in padded lanes
    head: Head
    looks_ahead: bool  # attention is over the whole prompt, in both directions: an encoder's
    stored: WeightStorage
    rounded: RoundedTensors | None  # by model.quantize, while they are read
    rope_lengths: RopeLengths | None  # of a model whose rotary embeddings depend on a sequence's length
    split_heads: HeadShare | None = None  # of a model of which this is one rank's part
    backends: BackendTable | None = None  # which linear backend is taken for what; None: by the rule

    @property
    def numbers(self) -> WeightStorage:
        """The storage formats of weights, with the relative error of weights that are quantized while loading."""
        return self.stored if self.rounded is None else replace(self.stored, relative_error=self.rounded.relative_error)

    @property
    def virtual_files(self) -> Mapping[str, Fill]:
        """Weight files that exist only in memory, for a reader."""
        return {} if self.rounded is None else self.rounded.fills

    def for_device(self, device: ComputeDevice) -> "LoadedModel":
        """The model with the attention method, and so the memory, of this device."""
        way = attention.attention_method(self.staged.model, self.shape, device)
        return replace(self, shape=replace(self.shape, attention_method=way))

    def weights_of(
        self, stage: Stage, buffer: torch.Tensor, tensor_offsets: Mapping[str, int], *, on_device: bool = False
    ) -> dict[str, torch.Tensor]:
        """A stage's weights as views into `buffer`; see `stage_weights`."""
        return stage_weights(stage, buffer, tensor_offsets, self.dtypes, self.backends, on_device=on_device)


class ModelSplit(ABC):
    """The division of a model among `count` tensor-parallel ranks."""

    count: int

    @abstractmethod
    def share_heads(self, cache: CacheShape, *, is_packed: bool) -> HeadShare:
        """The heads of each rank. Raises ConfigError if lanes are not packed or heads cannot be divided."""

    @abstractmethod
    def split_model(self, model: PreTrainedModel, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        """Reduces the model to this rank's part of each matrix and returns the parts' byte ranges. Mutates the model.
        Raises ConfigError if its class or its storage format cannot be split."""


def load_model(
    config: ModelConfig,
    device: torch.device,
    cache_dir: str | None,
    *,
    express: bool = True,
    truncated: TruncatedModel | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    split: ModelSplit | None = None,
    encodes: bool = False,
) -> LoadedModel:
    """Opens a checkpoint, maps its bytes to parameters, and stages the model.

    `express`: see `map_weights`; `truncated`: only the first layers; `split`: this rank's part; `encodes`: only the
    encoder of an encoder-decoder. Raises CheckpointError or ConfigError, with what to do.
    """
    empty = _build_empty_model(config, device, cache_dir, truncated, should_stop, encodes=encodes)
    model, checkpoint, class_name = empty.model, empty.checkpoint, type(empty.model).__name__

    # The class is run without weights to see what it does in lanes. An encoder's are rectangles without a cache, which
    # pass the model once.
    is_encoder = model_head(model) is not Head.text and looks_ahead(model)
    if is_encoder and config.lanes is Lanes.packed:
        raise ConfigError(f"model.lanes=packed: {class_name} cannot: {NO_DECODER}")
    is_packed, reason, padding = False, "", PaddingBehavior()
    with as_config_error(class_name):
        if is_encoder:
            padding = PaddingBehavior(whole_prompts="the class is an encoder, which sees all of a prompt at once")
            cache = encoder_cache_shape(model)
        else:
            is_packed, reason = choose_lanes(model, config.lanes) if truncated is None else (truncated.is_packed, "")
            if not is_packed and not model.config.is_encoder_decoder:
                padding = probe_padding(model)
            cache = measure_cache(model)
        _register_functions(model, is_packed=is_packed)
    if reason:
        log.info("lanes are padded: %s", reason)
    if not is_encoder:
        for reason in filter(None, (padding.separate_rows, padding.whole_prompts)):
            log.info("padded lanes: %s", reason)

    rounded = empty.make_rounded(config)
    parameters, digests = empty.map_bytes(rounded, config, cache_root(cache_dir), express, should_stop)
    heads = None if split is None else split.share_heads(cache, is_packed=is_packed)
    if split is not None:
        parameters = split.split_model(model, parameters)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}

    # Stand-ins take the places of modules, where there are operations for this device.
    ops = compiled_ops() if config.compile else None
    if ops is None and empty.dtype in DTYPES and device.type == "cpu":
        ops = host_ops()
    if ops is not None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(fuse(model, ops).items()))
        found = (
            f"{kinds} are fused, all else is transformers' own code"
            if kinds
            else "nothing is fused, as its code between products is that of no class known here"
        )
        log.debug("%s: %s", class_name, found)

    rope_lengths = follow_lengths(model)
    with as_config_error(class_name):
        staged = stage_model(model)
        name = class_name if config.name == ANY else config.name
        shape = make_shape(name, staged, parameters, cache, is_packed=is_packed)
    fill_buffers(staged, parameters, device)
    return LoadedModel(
        staged=staged,
        shape=replace(
            shape if split is None or split.count == 1 else shape.with_head_share(split.count),
            has_decode_kernel=is_packed and not cache.is_latent and device.type == "cpu" and can_compile(),
            has_whole_prompts=bool(padding.whole_prompts),
            restart_tokens=None if rope_lengths is None else rope_lengths.restart_tokens,
        ),
        expands_latents=cache.is_latent,
        padding=padding,
        head=model_head(model),
        looks_ahead=is_encoder,
        stored=WeightStorage.from_losses(shape, LOSSES, read_relative_error(empty.quantization)),
        rounded=rounded,
        rope_lengths=rope_lengths,
        split_heads=heads,
        dtypes=dtypes,
        compute_dtype=empty.dtype,
        tokenizer=load_tokenizer(config.tokenizer, checkpoint, cache_dir),
        generation=empty.generation,
        eos_token_ids=empty.generation.eos_token_ids,
        start_token_id=empty.generation.start_token_id if model.config.is_encoder_decoder else None,
        checkpoint=checkpoint,
        config=empty.described,
        fingerprint=empty.fingerprint,
        digests=digests,
    )


@dataclass(frozen=True, kw_only=True)
class _EmptyWeights:
    """A checkpoint and its model with parameters on the meta device. `described`: the config as published;
    `quantization`: its storage settings."""

    checkpoint: Checkpoint
    fingerprint: str
    model: PreTrainedModel
    dtype: torch.dtype
    described: Mapping[str, object]
    quantization: Mapping[str, object]
    generation: GenerationDefaults
    zeroed_rows: Mapping[str, Sequence[int]]  # see `runtime.probing.meta`

    def make_rounded(self, config: ModelConfig) -> RoundedTensors | None:
        """The checkpoint's tensors quantized by `model.quantize`. Raises CheckpointError if they are quantized
        already."""
        if config.quantize is None:
            return None
        stored = "GGUF" if self.checkpoint.gguf is not None else self.quantization.get("quant_method")
        if self.quantization or stored:
            raise CheckpointError(
                f"model.quantize={config.quantize.value}: {self.checkpoint.path} is stored in fewer bytes already "
                f"({stored or 'quantization_config'}): leave model.quantize out, or name the unquantised checkpoint"
            )
        return RoundedTensors.from_rounding(self.checkpoint.tensors, Rounding(config.quantize.value))

    def map_bytes(
        self,
        rounded: RoundedTensors | None,
        config: ModelConfig,
        kept: Path,
        express: bool,
        should_stop: Callable[[], bool],
    ) -> tuple[dict[str, Parameter], dict[str, str]]:
        """Byte ranges of all parameters by full name, and with model.verify=full the digests of files. Converts layouts
        that byte ranges cannot express into a file in `kept`."""
        checkpoint, model = self.checkpoint, self.model
        if checkpoint.gguf is not None:
            parameters, conversions = map_gguf(model, checkpoint)
        else:
            plain = pair_companions(checkpoint.tensors, self.quantization) if rounded is None else rounded.tensors
            parameters, conversions = map_weights(model, plain, express=express)
        is_verified = config.verify is Verify.full
        if self.quantization.get("quant_method") == METHOD:
            check_packed(checkpoint.files, is_full=is_verified)
        digests = dict(digest_files(checkpoint.files, kept, should_stop)) if is_verified else {}
        conversions += self._zeroing_conversions(parameters)
        made_here = {each.file for each in rounded.rounded} if rounded is not None else set[str]()
        for conversion in conversions:
            if any(source.file in made_here for source in conversion.sources):  # what is converted is a file
                name = config.quantize.value if config.quantize is not None else ""
                raise ConfigError(
                    f"model.quantize={name}: {conversion.targets[0]!r} lies in another layout than its class wants, "
                    "and is converted once into a file: "
                    f"weightstream pack out=OUT format={name} rounds it, then model.path=OUT"
                )
        if conversions:
            # Files that differ outside the sampled places are converted apart, where that is known.
            identity = "".join([self.fingerprint, *digests.values()])
            identity = hashlib.sha256(identity.encode()).hexdigest() if digests else identity
            converted = convert_once(model, conversions, kept, identity)
            tied = {name: parameters[name].pieces for name in converted if name in parameters}
            for name, parameter in parameters.items():
                shared = next((each for each, pieces in tied.items() if pieces == parameter.pieces), name)
                parameters[name] = replace(converted[shared], name=name) if shared in converted else parameter
            parameters |= converted
            if is_verified:
                files = sorted({piece.file for parameter in converted.values() for piece in parameter.slices})
                digests |= digest_files(files, kept, should_stop)
        parameters |= {name: replace(parameters[name], is_experts=True) for name in experts.stack_names(model)}
        return parameters, digests

    def _zeroing_conversions(self, parameters: Mapping[str, Parameter]) -> list[Conversion]:
        """Conversions for rows that transformers sets to zero while loading. Raises ConfigError for a matrix in several
        pieces."""
        found = list[Conversion]()
        class_name = type(self.model).__name__
        for name, rows in self.zeroed_rows.items():
            pieces = parameters[name].slices if name in parameters else ()
            if len(pieces) != 1:
                raise ConfigError(
                    f"model.path: transformers sets rows {list(rows)} of {name!r} to zero as it loads {class_name}, "
                    "which cannot be done here as the checkpoint holds it in parts: use transformers itself"
                )
            zeroed = make_zeroing(name, pieces[0], rows)
            if zeroed is not None:
                log.warning(
                    "%s: transformers sets row %s of %r to zero as it loads the class, whatever the checkpoint holds, "
                    "and so does this run",
                    class_name,
                    ", ".join(map(str, rows)),
                    name,
                )
                found.append(zeroed)
        return found


def _build_empty_model(
    config: ModelConfig,
    device: torch.device,
    cache_dir: str | None,
    truncated: TruncatedModel | None,
    should_stop: Callable[[], bool],
    *,
    encodes: bool,
) -> _EmptyWeights:
    """Reads the small files and headers of a checkpoint, and builds the model without weights."""
    if config.compile:
        require_accelerator(device)
    path = find_checkpoint(config, cache_dir, should_stop)
    checkpoint = open_checkpoint(path)
    hf_config = read_config(path, num_tensors=len(checkpoint.tensors))
    generation = read_generation(path, hf_config)
    described = hf_config.to_dict()
    quantization = pop_quantization_config(hf_config)
    dtype = _compute_dtype(config.dtype, hf_config, device)
    if truncated is not None:
        truncated.shorten(hf_config)
    most_tensors = 16 * len(checkpoint.tensors) + 8192  # several are fused in one of its own, or shared by many layers
    with as_checkpoint_error(f"{path}: config.json makes no model", described):
        model = build_meta_model(hf_config, dtype, max_tensors=most_tensors, encodes=encodes)
    with as_config_error(type(model).__name__):
        zeroed = zeroed_rows(model)
        drop_unused_modules(model)
        init_computed_parameters(model, checkpoint.tensors.keys())
        if truncated is not None:
            truncated.cut(model)
    return _EmptyWeights(
        checkpoint=checkpoint,
        fingerprint=checkpoint.fingerprint(),
        model=model,
        dtype=dtype,
        described=described,
        quantization=quantization,
        generation=generation,
        zeroed_rows=zeroed,
    )


def _compute_dtype(wanted: DType, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The compute dtype; `auto` follows the rule of plans. On a device, other checkpoint dtypes are kept."""
    if wanted is not DType.auto:
        return getattr(torch, wanted.value)
    stored = getattr(config, "dtype", None)
    if not isinstance(stored, torch.dtype):
        return torch.float32
    has_device, name = device.type != "cpu", str(stored).removeprefix("torch.")
    if has_device and name not in STORED_DTYPES:
        return stored
    known = DType(name) if name in STORED_DTYPES else DType.float32
    chosen = resolve_auto_dtype(known, has_device=has_device, has_bfloat16=not has_device or has_bfloat16_units(device))
    if has_device and chosen is not known:
        log.warning(
            "model.dtype=auto: %s, not the checkpoint's %s, for which %s has no units; a row whose numbers pass 65,504 "
            "becomes an error: model.dtype=float32 for a model with such numbers",
            chosen.value,
            name,
            torch.get_device_module(device).get_device_name(device),
        )
    return getattr(torch, chosen.value)


def _register_functions(model: PreTrainedModel, *, is_packed: bool) -> None:
    """Makes the class call our attention and expert functions."""
    if expert_kind(model) is ExpertKind.sorted:
        experts.register()
        model.set_experts_implementation(experts.NAME)
        assert model.config.get_text_config()._experts_implementation == experts.NAME, (
            "experts run without our function"
        )
    if is_packed:
        attention.register()
        model.set_attn_implementation(attention.NAME)
        if model.config._attn_implementation != attention.NAME:
            raise ConfigError(
                f"model.lanes: {type(model).__name__} ignores attention functions; use model.lanes=padded"
            )


def fill_buffers(staged: StagedModel, parameters: Mapping[str, Parameter], device: torch.device) -> None:
    """Loads persistent buffers outside all stages from the checkpoint; missing ones keep their computed values. Moves
    all buffers to `device`. Mutates the model. Raises OSError if a read fails."""
    for name, buffer in staged.model.state_dict(keep_vars=True).items():
        if name in parameters and name not in staged.stage_of:
            path, _, leaf = name.rpartition(".")
            pieces = [load_tensor(piece).reshape(-1) for blocks in parameters[name].pieces for piece in blocks]
            read = torch.cat(pieces).to(buffer.dtype).reshape(buffer.shape)
            staged.model.get_submodule(path)._buffers[leaf] = read
    for module in staged.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
