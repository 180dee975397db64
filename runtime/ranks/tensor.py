"""Tensor parallelism: each rank computes some rows of every matrix and some attention heads.

Every matrix is split by rows, which are its output features. Each output is computed by one rank, with the same
operations as on a single device. Outputs are concatenated, never summed, so results are exact. Modules keep their
classes; hooks gather inputs and outputs.

transformers has a tensor-parallel plan for many classes. The plan says which outputs may stay split until the next
matrix. Without a plan, or if the model does not run with it, every output is gathered at once.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config.settings import DividedExperts
from ..errors import ConfigError
from ..model.capabilities import CacheShape, fill_cache
from ..model.experts import is_experts, matrix_names
from ..model.loading import ModelSplit
from ..plan.shape.rank_shares import RowShare, cut_rows
from ..plan.shape.shapes import Parameter, distinct_bytes
from ..probing.empty_weights import PROBE_ERRORS, copy_on_meta
from ..probing.layer_lists import layer_lists
from ..units import format_bytes
from .collectives import AllGather
from .tensor_experts import describe_unsplit, split_experts

log = logging.getLogger(__name__)

UNSPLIT_STYLES = re.compile("replicate|mla|all_reduce")  # in transformers' plans: styles of matrices to leave whole


class Flow(Enum):
    """What a split linear layer gets and returns: all features (full), or only this rank's part of them."""

    full_to_part = "full to part"
    part_to_full = "part to full"
    full_to_full = "full to full"


STYLES = {"colwise": Flow.full_to_part, "rowwise": Flow.part_to_full}  # style in transformers' plans -> flow


@dataclass(frozen=True, kw_only=True)
class SplitHeads:
    """This rank's share of the attention heads: it caches some KV heads of each layer, and computes attention with the
    query heads that use them. `num_kv_heads`: number of all KV heads, by layer."""

    all_gather: AllGather
    num_kv_heads: Sequence[int]

    def has_all_heads(self, layer: int, states: torch.Tensor) -> bool:
        """True if keys or values (1, H, T, D) have all heads."""
        return states.shape[1] == self.num_kv_heads[layer]

    def select(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Selects this rank's heads of keys or values, unless `states` has only these already."""
        return self.slice_heads(states, 1) if self.has_all_heads(layer, states) else states

    def slice_heads(self, states: torch.Tensor, dim: int) -> torch.Tensor:
        share = RowShare(index=self.all_gather.index, count=self.all_gather.count).rows(states.shape[dim])
        return states.narrow(dim, share.start, len(share))

    def gather_heads(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return self.all_gather.gather(part, dim)


class TensorSplit(ModelSplit):
    """Splits a model among the ranks of `all_gather` while it is loaded."""

    def __init__(self, all_gather: AllGather):
        self._all_gather, self.count = all_gather, all_gather.count

    def share_heads(self, cache: CacheShape, *, is_packed: bool) -> SplitHeads:
        count, heads = self.count, [num_heads for num_heads, *_ in cache.heads]
        uneven = [num_heads for num_heads in heads if num_heads % count or not num_heads]
        why = f"{uneven[0]} KV heads are not a multiple of {count}" if uneven else ""
        why = "MLA latents are not split by head" if cache.is_latent else why
        why = why if is_packed else "padded lanes cache all heads"
        if why:
            raise ConfigError(
                f"devices=tensor: KV heads cannot be split among {count} ranks: {why}; use fewer ranks, or "
                "devices=sharded"
            )
        return SplitHeads(all_gather=self._all_gather, num_kv_heads=heads)

    def split_model(self, model: PreTrainedModel, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        splitting = _ModelSplitter(model, parameters, self._all_gather)
        splitting.split_linears()
        splitting.split_experts()
        splitting.split_tables()
        splitting.log_split()
        return {**parameters, **splitting.cut_parameters}


class _ModelSplitter:
    """Splits one model. `cut_parameters`: name -> this rank's part of a split parameter; `whole_experts`: those of them
    that are split by expert. Rank 0's setting `devices.experts` decides how experts are split."""

    def __init__(self, model: PreTrainedModel, parameters: Mapping[str, Parameter], all_gather: AllGather):
        self._model, self._parameters, self._all_gather = model, parameters, all_gather
        self._share = RowShare(index=all_gather.index, count=all_gather.count)
        self._names = defaultdict[int, list[str]](list)  # id of a parameter -> its names; tied ones have several
        for name, tensor in model.named_parameters(remove_duplicate=False):
            self._names[id(tensor)].append(name)
        self.cut_parameters: dict[str, Parameter] = {}
        self.whole_experts: dict[str, Parameter] = {}
        ranks = all_gather.ranks
        self._expert_division = DividedExperts(ranks.exchange({"experts": ranks.devices.experts.value})[0]["experts"])

    def split_linears(self) -> None:
        """Splits the linear modules of layers: by the class's tensor-parallel plan if the model runs with it, else with
        a gather after each."""
        name = type(self._model).__name__
        failure: str | None = None
        for flows in (
            self._linear_flows(self._model.tp_plan),
            dict.fromkeys(self._linear_flows({}), Flow.full_to_full),
        ):
            if (failure := self._find_failure(flows)) is None:
                for path, flow in flows.items():
                    module = self._linear(self._model, path)
                    self._cut_module(module)
                    self._split_linear(module, flow)
                return
            log.debug("%s by %s: %s", name, flows, failure)
        raise self._error(name, f"its code depends on the sizes of its matrices ({failure})")

    def _linear_flows(self, plan: Mapping[str, str]) -> dict[str, Flow]:
        """The linear modules to split: module path -> flow. `plan`: module path, with `*` for the layer index, ->
        style."""
        flows = dict[str, Flow]()
        for layers in layer_lists(self._model):
            for path, module in layers.layers.named_modules(prefix=layers.path):
                style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), "")
                flow = STYLES.get(style, Flow.full_to_full)
                if type(module) is not nn.Linear or UNSPLIT_STYLES.search(style):
                    continue
                if flow is not Flow.full_to_full or self._share.divides(module.out_features):
                    flows[path] = flow
        return flows

    def _find_failure(self, flows: Mapping[str, Flow]) -> str | None:
        """Runs a copy of the model with these splits on the meta device. Returns the error message, or None if it
        runs."""
        for path, flow in flows.items():
            height = self._linear(self._model, path).out_features
            if not self._share.divides(height):
                return f"{path} has {height:,} rows ({flow.value})"
        try:
            probe = copy_on_meta(self._model)
            probe.set_attn_implementation("eager")
            for path, flow in flows.items():
                self._split_linear(self._linear(probe, path), flow)
            fill_cache(probe, num_tokens=3)
        except PROBE_ERRORS as error:
            return str(error).partition("\n")[0] or type(error).__name__
        return None

    def split_experts(self) -> None:
        """Splits the stacked expert matrices of modules that run on Weightstream's experts function."""
        for path, module in self._model.named_modules():
            if not is_experts(module):
                continue
            stacks = {name: self._parameters[f"{path}.{name}"] for name in matrix_names(module)}
            # Name in the module -> all names in the model. Looked up by identity before the parameters are replaced.
            names = {name: self._names[id(module._parameters[name])] for name in stacks}
            split = split_experts(module, stacks, self._all_gather, self._expert_division)
            if not split.stacks:
                raise self._error(path, split.why_not, split.alternative)
            parts = {name: replace(part, name=name) for leaf, part in split.stacks.items() for name in names[leaf]}
            self.cut_parameters |= parts
            if split.own is not None:
                self.whole_experts |= parts

    def log_split(self) -> None:
        """Logs how many bytes of weights this rank reads."""
        uncut_bytes = distinct_bytes(p for name, p in self._parameters.items() if name not in self.cut_parameters)
        expert_bytes = distinct_bytes(self._parameters[name] for name in self.whole_experts)
        cut_bytes = distinct_bytes(self._parameters.values()) - uncut_bytes - expert_bytes
        own_bytes = distinct_bytes(self.whole_experts.values())
        experts = f", {format_bytes(own_bytes)} of {format_bytes(expert_bytes)} of experts" if expert_bytes else ""
        log.info(
            "devices=tensor: of %s of weights this rank holds 1/%d%s, and all of %s",
            *(format_bytes(cut_bytes), self._all_gather.count, experts, format_bytes(uncut_bytes)),
        )

    def split_tables(self) -> None:
        """Splits the embeddings and the head by vocabulary. If they are tied, splits both or neither."""
        model, share = self._model, self._share
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        table = table if isinstance(table, nn.Embedding) and share.divides(table.num_embeddings) else None
        head = head if isinstance(head, nn.Linear) and share.divides(head.out_features) else None
        for module in (table, head):
            is_tied = module is not None and any(len(self._names[id(tensor)]) > 1 for tensor in module.parameters())
            if module is not None and ((table is not None and head is not None) or not is_tied):
                self._cut_module(module)
        if isinstance(head, nn.Linear) and self._is_cut(head):
            split_linear(head, self._all_gather, is_input_split=False, is_output_split=False)
        if table is not None and self._is_cut(table):
            split_embedding(table, self._all_gather)

    def _is_cut(self, module: nn.Module) -> bool:
        return any(name in self.cut_parameters for tensor in module.parameters() for name in self._names[id(tensor)])

    def _cut_module(self, module: nn.Module) -> None:
        """Records this rank's part of a module's parameters. Tied parameters are recorded under all their names."""
        for tensor in module.parameters(recurse=False):
            for name in self._names[id(tensor)]:
                part = cut_rows(self._parameters[name], self._share)
                if part is None:
                    raise self._error(repr(name), describe_unsplit(self._parameters[name]))
                self.cut_parameters[name] = part

    def _split_linear(self, module: nn.Linear, flow: Flow) -> None:
        split_linear(
            module,
            self._all_gather,
            is_input_split=flow is Flow.part_to_full,
            is_output_split=flow is Flow.full_to_part,
        )

    def _linear(self, model: nn.Module, path: str) -> nn.Linear:
        module = model.get_submodule(path)
        assert isinstance(module, nn.Linear)
        return module

    def _error(self, what: str, why: str, alternative: str = "") -> ConfigError:
        count, remedy = self._all_gather.count, f"set {alternative}" if alternative else "use fewer ranks"
        return ConfigError(
            f"devices=tensor: {what} cannot be split among {count} ranks: {why}; {remedy}, or devices=sharded"
        )


def shrink_parameters(module: nn.Module, height: int) -> None:
    """Replaces the module's parameters by uninitialized ones of `height` rows. Mutates the module."""
    for name, old in module._parameters.items():
        if old is not None:
            new = torch.empty(height, *old.shape[1:], dtype=old.dtype, device=old.device)
            module._parameters[name] = nn.Parameter(new, requires_grad=False)


def split_linear(module: nn.Linear, all_gather: AllGather, *, is_input_split: bool, is_output_split: bool) -> None:
    """Makes the module compute only this rank's output features. `is_input_split`: the module gathers its input first.
    `is_output_split`: the module does not gather its output. Mutates the module."""
    module.out_features //= all_gather.count
    shrink_parameters(module, module.out_features)
    if is_input_split:
        module.register_forward_pre_hook(lambda _, args: (all_gather.gather(args[0]), *args[1:]))
    if not is_output_split:
        module.register_forward_hook(lambda _, args, out: all_gather.gather(cast(torch.Tensor, out)))


def split_embedding(module: nn.Embedding, all_gather: AllGather) -> None:
    """Makes the module contain only this rank's rows. A lookup sums the results of all ranks; those without the row
    contribute zeros. Mutates the module."""
    module.num_embeddings //= all_gather.count
    module.padding_idx = None  # only used for gradients, and may be out of range here
    shrink_parameters(module, module.num_embeddings)
    hooks = _EmbeddingHooks(all_gather, module.num_embeddings)
    module.register_forward_pre_hook(hooks.before)
    module.register_forward_hook(hooks.after)


class _EmbeddingHooks:
    """Hooks of a split embedding. `before` converts token ids (B, T) to this rank's row numbers; `after` sums the
    outputs (B, T, D) over ranks."""

    def __init__(self, all_gather: AllGather, num_rows: int):
        self._all_gather, self._num_rows, self._is_local = all_gather, num_rows, torch.empty(0)

    def before(self, module: nn.Module, args: Any) -> tuple[Any, ...]:
        rows = args[0] - self._all_gather.index * self._num_rows
        self._is_local = (rows >= 0) & (rows < self._num_rows)
        return torch.where(self._is_local, rows, 0), *args[1:]

    def after(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return self._all_gather.sum(torch.where(self._is_local[..., None], out, torch.zeros_like(out)))
