"""The first DeepSeek-MoE (16B, model type "deepseek"), which transformers lacks: Llama's layers with Qwen2-MoE's router
and experts. Default sizes and tensor names are those of the published checkpoint. Routing follows arXiv 2401.06066:
softmax over all routed experts, the top k weighted by their scores, plus shared experts for every token."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeMLP, Qwen2MoeTopKRouter

MODEL_TYPE = "deepseek"
EXPERTS_LIKE = "qwen2_moe"  # a model type of transformers whose expert tensors have the same names


class DeepseekConfig(LlamaConfig):
    """The config. Names are those of the published config.json; defaults are those of the 16B model."""

    model_type = MODEL_TYPE
    attribute_map = {"num_experts": "n_routed_experts"}  # noqa: RUF012 - as transformers declares it

    vocab_size: int = 102400
    hidden_size: int = 2048
    intermediate_size: int = 10944  # of dense layers
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"

    def __post_init__(self, **kwargs: object) -> None:
        if self.scoring_func != "softmax":
            raise ValueError(f"scoring_func={self.scoring_func!r} is not supported; must be 'softmax'")
        super().__post_init__(**kwargs)

    def is_sparse(self, layer_idx: int) -> bool:
        return layer_idx >= self.first_k_dense_replace and layer_idx % self.moe_layer_freq == 0


class DeepseekMoE(nn.Module):
    """Routed experts, plus the shared experts as one wide MLP."""

    def __init__(self, config: DeepseekConfig):
        super().__init__()
        self.gate = Qwen2MoeTopKRouter(config)
        self.experts = Qwen2MoeExperts(config)
        self.shared_experts = Qwen2MoeMLP(config, config.n_shared_experts * config.moe_intermediate_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(tokens)
        return self.experts(tokens, index, weights).view_as(hidden_states) + self.shared_experts(hidden_states)


class DeepseekDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: DeepseekConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.is_sparse(layer_idx):
            self.mlp = DeepseekMoE(config)


class DeepseekPreTrainedModel(LlamaPreTrainedModel):
    config_class = DeepseekConfig
    _no_split_modules = ["DeepseekDecoderLayer"]  # noqa: RUF012 - as transformers declares it

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Always returns True. transformers' own method searches this module for the decorator of experts, which is in
        another module. It also caches its result on the class, so this class would inherit Llama's result."""
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (Qwen2MoeExperts, Qwen2MoeTopKRouter)):
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)


class DeepseekModel(DeepseekPreTrainedModel, LlamaModel):
    """Llama's forward. Skips Llama's constructor, which would build dense layers first."""

    def __init__(self, config: DeepseekConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([DeepseekDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class DeepseekForCausalLM(DeepseekPreTrainedModel, LlamaForCausalLM):
    def __init__(self, config: DeepseekConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.vocab_size = config.vocab_size
        self.model = DeepseekModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def register() -> None:
    """Registers the model type with transformers' auto classes and checkpoint loader. Idempotent. transformers raises
    ValueError if it has this model type itself."""
    AutoConfig.register(MODEL_TYPE, DeepseekConfig)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
    experts = get_checkpoint_conversion_mapping(EXPERTS_LIKE)
    assert experts is not None, f"transformers no longer converts the experts of {EXPERTS_LIKE}"
    register_checkpoint_conversion_mapping(MODEL_TYPE, experts, overwrite=True)
