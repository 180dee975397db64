"""Makes a model of a checkpoint's multi-token prediction (MTP) head, which guesses the token after the next one
(DeepSeek-V3, arXiv 2412.19437, section 2.2). DeepSeek-V3 and later, and GLM-4.5 and later are published with one.

The head is one more layer. At position i it gets the hidden state of token i and the embedding of token i + 1, both
normalized and projected to one vector, and predicts token i + 2. So it is a model of one layer whose embedding also
takes hidden states. The class of the whole model computes everything else.

Letters: T tokens of D features.
"""

import copy
import re
from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import ConfigError
from ..plan.shape.shapes import TensorSlice
from ..probing.layer_lists import decoder_config, layer_lists

PROJECTION = re.compile(r"^(?P<prefix>(?:.*\.)?)layers\.(?P<layer>\d+)\.eh_proj\.")
OWN_PARTS = re.compile(r"^(enorm|hnorm|eh_proj)\.")  # before the head's layer
NORM, SHARED = "shared_head.norm.", ("shared_head.head.", "embed_tokens.")  # the latter equal those of the whole model


class MtpEmbedding(nn.Module):
    """The embedding of an MTP head: embeds tokens, and projects them together with hidden states.

    `hidden_1TD`: the hidden state of the token before each token of the next pass, as the whole model's head gets them;
    None stands for zeros, for dry runs.
    """

    def __init__(self, embedding: nn.Embedding, norm: nn.Module):
        super().__init__()
        size, dtype = embedding.embedding_dim, embedding.weight.dtype
        self.embedding, self.enorm, self.hnorm = embedding, copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False, device="meta", dtype=dtype)
        self.hidden_1TD: torch.Tensor | None = None

    def forward(self, ids_1T: torch.Tensor) -> torch.Tensor:
        embedded_1TD = self.embedding(ids_1T)
        hidden_1TD = torch.zeros_like(embedded_1TD) if self.hidden_1TD is None else self.hidden_1TD
        return self.eh_proj(torch.cat([self.enorm(embedded_1TD), self.hnorm(hidden_1TD)], -1))


def head_tensors(tensors: Mapping[str, TensorSlice], config: PreTrainedConfig) -> dict[str, TensorSlice]:
    """Returns the tensors of a checkpoint's MTP head, and those that it shares with the whole model, by their names in
    the model of the head. Raises ConfigError if the checkpoint has no head."""
    num_layers = decoder_config(config).num_hidden_layers
    found = (PROJECTION.match(name) for name in tensors)
    heads = {int(match["layer"]): match["prefix"] for match in found if match and int(match["layer"]) >= num_layers}
    if not heads:
        raise ConfigError(
            f"the checkpoint has no prediction head as of DeepSeek-V3 and GLM-4.5, with a tensor "
            f"...layers.{num_layers}.eh_proj.weight: set a small model of the same family, or null"
        )
    prefix = heads[first := min(heads)]
    layers, own, embedding = f"{prefix}layers.", f"{prefix}layers.{first}.", f"{prefix}embed_tokens."
    renamed = dict[str, TensorSlice]()
    for name, tensor in tensors.items():
        if name.startswith(own):
            part = name.removeprefix(own)
            if OWN_PARTS.match(part):
                renamed[embedding + part] = tensor
            elif part.startswith(NORM):
                renamed[f"{prefix}norm.{part.removeprefix(NORM)}"] = tensor
            elif not part.startswith(SHARED):
                renamed[f"{layers}0.{part}"] = tensor
        elif name.startswith(embedding):
            renamed[f"{embedding}embedding.{name.removeprefix(embedding)}"] = tensor
        elif not name.startswith((layers, f"{prefix}norm.")):
            renamed[name] = tensor
    return renamed


def head_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of a model with one layer, which is like the last one."""
    shortened = copy.deepcopy(config)
    decoder = decoder_config(shortened)
    num_layers = decoder.num_hidden_layers
    for name, value in list(vars(decoder).items()):
        is_per_layer = isinstance(value, list | tuple) and num_layers <= len(value) <= num_layers + 1  # with the head
        if is_per_layer and num_layers > 1:
            setattr(decoder, name, value[-1:])
    decoder.num_hidden_layers = 1
    if hasattr(decoder, "first_k_dense_replace"):  # the number of first layers without experts
        decoder.first_k_dense_replace = 0
    return shortened


def add_head_embedding(model: PreTrainedModel) -> MtpEmbedding:
    """Replaces the embedding of a model with one layer by that of the head. Mutates `model`. Raises ConfigError for a
    class with other embeddings."""
    embedding, decoder = model.get_input_embeddings(), model.get_decoder()
    if type(embedding) is not nn.Embedding or getattr(decoder, "embed_tokens", None) is not embedding:
        raise ConfigError(f"prediction head: {type(model).__name__} does not embed tokens by a plain table")
    size = (embedding.embedding_dim,)
    norms = (
        module
        for name, module in layer_lists(model)[0].layers[0].named_modules()
        if "norm" in name
        and isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        and weight.shape == size
    )
    if (norm := next(norms, None)) is None:
        raise ConfigError(f"prediction head: the layers of {type(model).__name__} have no norm")
    decoder.embed_tokens = MtpEmbedding(embedding, norm)
    return cast("MtpEmbedding", decoder.embed_tokens)
