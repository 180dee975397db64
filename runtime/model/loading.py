"""Loads a model without its weights: opens a checkpoint, finds the bytes of each parameter, and splits the model into
stages, whose weights are read later.

Lanes run micro-batches: packed lanes concatenate sequences of different lengths, padded lanes pad them.
"""

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
from ..probing.tables import find_tables
from ..store.checkpoint import Checkpoint, open_checkpoint
from ..store.file_digests import check_packed, digest_files
from ..store.reader import Fill
from ..stream.device import ComputeDevice, has_bfloat16_units
from ..weights.conversions import Conversion, convert_once, make_zeroing
from ..weights.gguf_layout import map_gguf
from ..weights.layout import init_computed_parameters, map_weights, pop_quantization_config
from ..weights.rounding_files import RoundedTensors
from ..weights.stage_weights import can_gather, load_tensor, stage_weights
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
from .mtp_head import MtpEmbedding, add_head_embedding, head_config, head_tensors
from .rope_lengths import RopeLengths, follow_lengths
from .stages import StagedModel, stage_model
from .truncated_model import TruncatedModel, drop_unused_modules

log = logging.getLogger(__name__)

# Dtypes that the setting model.dtype offers, by name.
OFFERED_DTYPES = frozenset(dtype.value for dtype in DType if dtype is not DType.auto)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A staged model and its checkpoint."""

    staged: StagedModel
    shape: ModelShape
    dtypes: Mapping[str, torch.dtype]  # compute dtype by full parameter name
    compute_dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase | None
    generation: GenerationDefaults
    eos_token_ids: frozenset[int]
    start_token_id: int | None  # first decoder token of an encoder-decoder; None for other models
    checkpoint: Checkpoint
    config: Mapping[str, object]  # config.json, including quantization
    fingerprint: str  # of the checkpoint
    digests: Mapping[str, str]  # path of a weight file -> its SHA-256; empty without model.verify=full
    expands_latents: bool  # see `CacheShape.is_latent`
    padding: PaddingBehavior  # of a decoder in padded lanes
    head: Head
    looks_ahead: bool  # bidirectional attention over the whole prompt: an encoder
    stored: WeightStorage  # formats in the checkpoint
    rounded: RoundedTensors | None  # with model.quantize: weights that are rounded while they are read
    rope_lengths: RopeLengths | None  # if rotary embeddings depend on a sequence's length
    split_heads: HeadShare | None = None  # with tensor parallelism: this rank's heads
    backends: BackendTable | None = None  # measured choice of linear backends; None: the default rule
    mtp_embedding: MtpEmbedding | None = None  # of an MTP head, which needs hidden states

    @property
    def weight_storage(self) -> WeightStorage:
        """The storage formats of the weights. Includes the error of weights rounded while they are read, once all of
        them were read."""
        return self.stored if self.rounded is None else replace(self.stored, relative_error=self.rounded.relative_error)

    @property
    def virtual_files(self) -> Mapping[str, Fill]:
        """Files that do not exist on disk: name -> function that fills memory with the file's bytes, for `Reader`."""
        return {} if self.rounded is None else self.rounded.fills

    def for_device(self, device: ComputeDevice) -> "LoadedModel":
        """Returns a copy whose shape has the attention method for this device, on which memory use depends."""
        method = attention.attention_method(self.staged.model, self.shape, device)
        return replace(self, shape=replace(self.shape, attention_method=method))

    def weights_of(
        self, stage: Stage, buffer: torch.Tensor, tensor_offsets: Mapping[str, int], *, on_device: bool = False
    ) -> dict[str, torch.Tensor]:
        """Returns a stage's weights as views into `buffer`; see `stage_weights`."""
        return stage_weights(stage, buffer, tensor_offsets, self.dtypes, self.backends, on_device=on_device)


class ModelSplit(ABC):
    """The division of a model among `count` tensor-parallel ranks."""

    count: int

    @abstractmethod
    def share_heads(self, cache: CacheShape, *, is_packed: bool) -> HeadShare:
        """Returns this rank's heads. Raises ConfigError if lanes are not packed or heads cannot be divided."""

    @abstractmethod
    def split_model(self, model: PreTrainedModel, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        """Reduces the model's matrices to this rank's parts. Returns the byte ranges of these parts, by full parameter
        name. Mutates the model. Raises ConfigError if its class or its storage format cannot be split."""


def load_model(
    config: ModelConfig,
    device: torch.device,
    cache_dir: str | None,
    *,
    use_byte_ranges: bool = True,
    truncated: TruncatedModel | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    split: ModelSplit | None = None,
    encodes: bool = False,
    is_mtp_head: bool = False,
) -> LoadedModel:
    """Opens a checkpoint, finds the bytes of each parameter, and stages the model.

    `use_byte_ranges`: see `map_weights`. `truncated`: load only the first layers. `split`: load only this rank's part.
    `encodes`: load only the encoder of an encoder-decoder. `is_mtp_head`: load only the checkpoint's MTP head, see
    mtp_head.py. Raises CheckpointError or ConfigError.
    """
    empty = _build_empty_model(
        config, device, cache_dir, truncated, should_stop, encodes=encodes, is_mtp_head=is_mtp_head
    )
    model, checkpoint, class_name = empty.model, empty.checkpoint, type(empty.model).__name__

    # Run the class without weights to choose packed or padded lanes. An encoder has padded lanes without a cache.
    is_encoder = model_head(model) is not Head.text and looks_ahead(model)
    if is_encoder and config.lanes is Lanes.packed:
        raise ConfigError(f"model.lanes=packed: not possible for {class_name}: {NO_DECODER}; set auto or padded")
    is_packed, reason, padding = False, "", PaddingBehavior()
    with as_config_error(class_name):
        if is_encoder:
            padding = PaddingBehavior(
                whole_prompts_reason="the class is an encoder, which needs the whole prompt at once"
            )
            cache = encoder_cache_shape(model)
        else:
            is_packed, reason = choose_lanes(model, config.lanes) if truncated is None else (truncated.is_packed, "")
            if not is_packed and not model.config.is_encoder_decoder:
                padding = probe_padding(model)
            cache = measure_cache(model)
        tables = find_tables(model)
        _register_functions(model, is_packed=is_packed)
    if reason:
        log.debug("lanes are padded: %s", reason)
    if not is_encoder:
        for reason in filter(None, (padding.separate_rows_reason, padding.whole_prompts_reason)):
            log.debug("padded lanes: %s", reason)

    rounded = empty.make_rounded(config)
    parameters, digests = empty.map_bytes(rounded, config, cache_root(cache_dir), use_byte_ranges, should_stop)
    heads = None if split is None else split.share_heads(cache, is_packed=is_packed)
    if split is not None:
        parameters = split.split_model(model, parameters)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}

    ops = compiled_ops() if config.compile else None
    if ops is None and empty.dtype in DTYPES and device.type == "cpu":
        ops = host_ops()
    if ops is not None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(fuse(model, ops).items()))
        log.debug("%s: fused modules: %s", class_name, kinds or "none: no module has the code of a supported class")

    virtual = () if rounded is None else rounded.fills
    for name, rows_per_token in tables.items():
        if can_gather(parameters[name], virtual):
            parameters[name] = replace(parameters[name], rows_per_token=rows_per_token)
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
            has_whole_prompts=bool(padding.whole_prompts_reason),
            restart_tokens=None if rope_lengths is None else rope_lengths.restart_tokens,
            is_mtp_head=is_mtp_head,
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
        config=empty.published_config,
        fingerprint=empty.fingerprint,
        digests=digests,
        mtp_embedding=empty.mtp_embedding,
    )


@dataclass(frozen=True, kw_only=True)
class _EmptyWeights:
    """A checkpoint, and its model with parameters on the meta device."""

    checkpoint: Checkpoint
    fingerprint: str
    model: PreTrainedModel
    dtype: torch.dtype
    published_config: Mapping[str, object]  # config.json, including quantization
    quantization: Mapping[str, object]  # its quantization_config
    generation: GenerationDefaults
    zeroed_rows: Mapping[str, Sequence[int]]  # parameter -> rows that transformers sets to zero when it loads the class
    mtp_embedding: MtpEmbedding | None

    def make_rounded(self, config: ModelConfig) -> RoundedTensors | None:
        """Returns the tensors that `model.quantize` rounds while they are read; None if it is not set. Raises
        CheckpointError if the checkpoint is quantized already."""
        if config.quantize is None:
            return None
        stored = "GGUF" if self.checkpoint.gguf is not None else self.quantization.get("quant_method")
        if self.quantization or stored:
            raise CheckpointError(
                f"model.quantize={config.quantize.value}: {self.checkpoint.path} is quantized already "
                f"({stored or 'quantization_config'}): unset model.quantize, or use the unquantized checkpoint"
            )
        return RoundedTensors.from_rounding(self.checkpoint.tensors, Rounding(config.quantize.value))

    def map_bytes(
        self,
        rounded: RoundedTensors | None,
        config: ModelConfig,
        cache: Path,
        use_byte_ranges: bool,
        should_stop: Callable[[], bool],
    ) -> tuple[dict[str, Parameter], dict[str, str]]:
        """Returns the byte ranges of all parameters by full name, and with model.verify=full the SHA-256 of files by
        path. Converts parameters whose layout is no sequence of byte ranges into a file in `cache`, and uses that."""
        checkpoint, model = self.checkpoint, self.model
        if checkpoint.gguf is not None:
            parameters, conversions = map_gguf(model, checkpoint)
        else:
            # Quantized tensors with their companions attached, such as scales.
            tensors = pair_companions(checkpoint.tensors, self.quantization) if rounded is None else rounded.tensors
            parameters, conversions = map_weights(model, tensors, use_byte_ranges=use_byte_ranges)
        is_verified = config.verify is Verify.full
        if self.quantization.get("quant_method") == METHOD:  # written by `weightstream pack`
            check_packed(checkpoint.stored_files, is_full=is_verified)
        digests = dict(digest_files(checkpoint.stored_files, cache, should_stop)) if is_verified else {}
        conversions += self._zeroing_conversions(parameters)
        virtual = set(rounded.fills) if rounded is not None else set[str]()  # files that exist only while they are read
        for conversion in conversions:
            if any(source.file in virtual for source in conversion.sources):  # conversions read files on disk
                name = config.quantize.value if config.quantize is not None else ""
                raise ConfigError(
                    f"model.quantize={name}: {conversion.targets[0]!r} is stored in another layout than its class "
                    f"needs: run weightstream pack out=OUT format={name}, then set model.path=OUT"
                )
        if conversions:
            # The fingerprint covers only samples of the bytes. With digests, the cached file is specific to all bytes.
            identity = "".join([self.fingerprint, *digests.values()])
            identity = hashlib.sha256(identity.encode()).hexdigest() if digests else identity
            converted = convert_once(model, conversions, cache, identity)
            # Parameters tied to a converted one have the same byte ranges: they must use the converted bytes too.
            old_pieces = {name: parameters[name].pieces for name in converted if name in parameters}
            for name, parameter in parameters.items():
                twin = next((other for other, pieces in old_pieces.items() if pieces == parameter.pieces), None)
                if twin is not None:
                    parameters[name] = replace(converted[twin], name=name)
            parameters |= converted
            if is_verified:
                files = sorted({tensor.file for parameter in converted.values() for tensor in parameter.slices})
                digests |= digest_files(files, cache, should_stop)
        parameters |= {name: replace(parameters[name], is_experts=True) for name in experts.stack_names(model)}
        return parameters, digests

    def _zeroing_conversions(self, parameters: Mapping[str, Parameter]) -> list[Conversion]:
        """Returns conversions that zero the rows which transformers sets to zero while loading. Raises ConfigError for
        a matrix made of several tensors."""
        conversions, class_name = list[Conversion](), type(self.model).__name__
        for name, rows in self.zeroed_rows.items():
            tensors = parameters[name].slices if name in parameters else ()
            if len(tensors) != 1:
                raise ConfigError(
                    f"model.path: transformers sets rows {list(rows)} of {name!r} to zero when it loads {class_name}; "
                    "not supported for a matrix made of several tensors: use transformers itself"
                )
            zeroing = make_zeroing(name, tensors[0], rows)
            if zeroing is not None:
                numbers = ", ".join(map(str, rows))
                log.warning("%s: sets row %s of %r to zero, as transformers does", class_name, numbers, name)
                conversions.append(zeroing)
        return conversions


def _build_empty_model(
    config: ModelConfig,
    device: torch.device,
    cache_dir: str | None,
    truncated: TruncatedModel | None,
    should_stop: Callable[[], bool],
    *,
    encodes: bool,
    is_mtp_head: bool,
) -> _EmptyWeights:
    """Reads the small files and headers of a checkpoint, and builds the model on the meta device."""
    if config.compile:
        require_accelerator(device)
    path = find_checkpoint(config, cache_dir, should_stop)
    checkpoint = open_checkpoint(path, config.mirrors)
    hf_config = read_config(path, num_tensors=len(checkpoint.tensors))
    generation = read_generation(path, hf_config)
    published_config = hf_config.to_dict()
    quantization = pop_quantization_config(hf_config)
    dtype = _compute_dtype(config.dtype, hf_config, device)
    if truncated is not None:
        truncated.shorten(hf_config)
    if is_mtp_head:
        checkpoint = replace(checkpoint, tensors=head_tensors(checkpoint.tensors, hf_config))
        hf_config = head_config(hf_config)
    # A stored tensor may be split into several parameters, or used under several names.
    max_tensors = 16 * len(checkpoint.tensors) + 8192
    with as_checkpoint_error(f"{path}: config.json: cannot build the model", published_config):
        model = build_meta_model(hf_config, dtype, max_tensors=max_tensors, encodes=encodes)
    with as_config_error(type(model).__name__):
        zeroed = {} if is_mtp_head else zeroed_rows(model)
        mtp_embedding = add_head_embedding(model) if is_mtp_head else None
        drop_unused_modules(model)
        init_computed_parameters(model, checkpoint.tensors.keys())
        if truncated is not None:
            truncated.cut(model)
    return _EmptyWeights(
        checkpoint=checkpoint,
        fingerprint=checkpoint.fingerprint(),
        model=model,
        dtype=dtype,
        published_config=published_config,
        quantization=quantization,
        generation=generation,
        zeroed_rows=zeroed,
        mtp_embedding=mtp_embedding,
    )


def _compute_dtype(setting: DType, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Returns the compute dtype for model.dtype; `auto` is resolved as in plans. On an accelerator, `auto` keeps a
    checkpoint's dtype that model.dtype does not offer."""
    if setting is not DType.auto:
        return getattr(torch, setting.value)
    stored = getattr(config, "dtype", None)
    if not isinstance(stored, torch.dtype):
        return torch.float32
    is_accelerator, name = device.type != "cpu", str(stored).removeprefix("torch.")
    if is_accelerator and name not in OFFERED_DTYPES:
        return stored
    published = DType(name) if name in OFFERED_DTYPES else DType.float32
    has_bfloat16 = not is_accelerator or has_bfloat16_units(device)
    chosen = resolve_auto_dtype(published, has_device=is_accelerator, has_bfloat16=has_bfloat16)
    if is_accelerator and chosen is not published:
        log.warning(
            "model.dtype=auto: %s, not the checkpoint's %s, for which %s has no units; a row with numbers above 65,504 "
            "becomes an error row: set model.dtype=float32 if the model has such numbers",
            chosen.value,
            name,
            torch.get_device_module(device).get_device_name(device),
        )
    return getattr(torch, chosen.value)


def _register_functions(model: PreTrainedModel, *, is_packed: bool) -> None:
    """Makes the class call Weightstream's attention and expert functions."""
    if expert_kind(model) is ExpertKind.sorted:
        experts.register()
        model.set_experts_implementation(experts.NAME)
        assert model.config.get_text_config()._experts_implementation == experts.NAME, "the setting had no effect"
    if is_packed:
        attention.register()
        model.set_attn_implementation(attention.NAME)
        if model.config._attn_implementation != attention.NAME:
            name = type(model).__name__
            raise ConfigError(f"model.lanes: {name} ignores attention functions; set model.lanes=padded")


def fill_buffers(staged: StagedModel, parameters: Mapping[str, Parameter], device: torch.device) -> None:
    """Loads persistent buffers that belong to no stage; buffers missing in the checkpoint keep the values that the
    class computed. Moves all buffers to `device`. Mutates the model. Raises OSError if a read fails."""
    for name, buffer in staged.model.state_dict(keep_vars=True).items():
        if name in parameters and name not in staged.stage_of:
            path, _, leaf = name.rpartition(".")
            pieces = [load_tensor(piece).reshape(-1) for entry in parameters[name].pieces for piece in entry]
            value = torch.cat(pieces).to(buffer.dtype).reshape(buffer.shape)
            staged.model.get_submodule(path)._buffers[leaf] = value
    for module in staged.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
