"""Which way of attention a loaded model takes where it computes.

It stands alone: it asks a loaded model, and loading imports attention.
"""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..attention.device_attention import fused_applies
from ..attention.flash_attention import flash_applies
from ..attention.rule import Rule
from ..plan.shape.attention import AttentionWay
from ..plan.shape.model import ModelShape
from ..probing.decoder_config import decoder_config
from ..stream.device import ComputeDevice
from .loading import LoadedModel


def attention_way(model: PreTrainedModel, shape: ModelShape, device: ComputeDevice) -> AttentionWay:
    """Says how its ordinary layers attend."""
    if not (device.is_accelerator and shape.is_packed):
        return AttentionWay.host
    softcap = getattr(decoder_config(model.config), "attn_logit_softcapping", None)
    like = torch.empty(0, shape.head_dim, dtype=model.dtype, device=device.torch_device)
    if flash_applies(like, like, like, Rule(1.0, softcap)) and not shape.kv_dtype.is_quantized:
        return AttentionWay.flash
    is_fused = not shape.score_heads and fused_applies(like, like, Rule(1.0))
    return AttentionWay.fused if is_fused else AttentionWay.scored


def placed(loaded: LoadedModel, device: ComputeDevice) -> LoadedModel:
    """Returns the model with what its layers take of memory on this device."""
    way = attention_way(loaded.staged.model, loaded.shape, device)
    return replace(loaded, shape=replace(loaded.shape, attention_way=way))
