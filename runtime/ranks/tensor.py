"""A model of which each of several ranks computes a part of every layer: rows of its matrices, and some of its heads.

transformers' plan of a class says whose numbers go on as parts, from one matrix to the next. Of a class without one,
and where it does not hold, each matrix's numbers are made whole at once.

Every matrix is cut by its rows, the numbers that it makes. So each number is summed by one rank, in the order in which
a single device sums it, and parts are put side by side, never added up. Modules stay what they are: hooks make inputs
and outputs whole.
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

NOT_SPLIT = "devices=tensor: {} cannot be split among {} ranks: {}"
UNSPLIT_STYLES = re.compile("replicate|mla|all_reduce")  # styles of transformers' plans that leave a matrix as it is


class Flow(Enum):
    """Input and output of a split linear layer: all features, or only this rank's part of them."""

    full_to_part = "full to part"
    part_to_full = "part to full"
    full_to_full = "full to full"


STYLES = {"colwise": Flow.full_to_part, "rowwise": Flow.part_to_full}


@dataclass(frozen=True, kw_only=True)
class SplitHeads:
    """The KV heads of each layer, of which a rank caches its share and looks at it with the queries that belong to
    it."""

    all_gather: AllGather
    num_kv_heads: Sequence[int]

    def has_all_heads(self, layer: int, states: torch.Tensor) -> bool:
        """Whether keys or values (1, H, T, D) are of all heads."""
        return states.shape[1] == self.num_kv_heads[layer]

    def select(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """This rank's part of keys or values, which may be it already."""
        return self.slice_heads(states, 1) if self.has_all_heads(layer, states) else states

    def slice_heads(self, states: torch.Tensor, dim: int) -> torch.Tensor:
        share = RowShare(index=self.all_gather.index, count=self.all_gather.count).rows(states.shape[dim])
        return states.narrow(dim, share.start, len(share))

    def gather_heads(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return self.all_gather.gather(part, dim)


class TensorSplit(ModelSplit):
    """A model's division among the ranks of `all_gather`, as a loader asks for it."""

    def __init__(self, all_gather: AllGather):
        self._all_gather, self.count = all_gather, all_gather.count

    def share_heads(self, cache: CacheShape, *, is_packed: bool) -> SplitHeads:
        count, heads = self.count, [num_heads for num_heads, *_ in cache.heads]
        odd = [num_heads for num_heads in heads if num_heads % count or not num_heads]
        why = f"{odd[0]} KV heads are no multiple of {count}" if odd else ""
        why = "latents are of all heads" if cache.is_latent else why
        why = why if is_packed else "padded lanes keep all heads"
        if why:
            raise ConfigError(
                f"devices=tensor: keys and values cannot be shared by {count} ranks: {why}; take fewer ranks, or "
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
    """`taken`: the parameters that are split already, `whole`: those of them that are experts of which this rank has
    some. Experts are divided as rank 0 is asked to."""

    def __init__(self, model: PreTrainedModel, parameters: Mapping[str, Parameter], all_gather: AllGather):
        self._model, self._parameters, self._all_gather = model, parameters, all_gather
        self._share = RowShare(index=all_gather.index, count=all_gather.count)
        self._names = defaultdict[int, list[str]](list)
        for name, tensor in model.named_parameters(remove_duplicate=False):
            self._names[id(tensor)].append(name)
        self.cut_parameters: dict[str, Parameter] = {}
        self.whole_experts: dict[str, Parameter] = {}
        ranks = all_gather.ranks
        self._expert_division = DividedExperts(ranks.exchange({"experts": ranks.devices.experts.value})[0]["experts"])

    def split_linears(self) -> None:
        """The matrices of layers, by the plan of the class or, where it does not run by that, each by itself."""
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
        raise self._error(name, f"its code looks at sizes of its own ({failure})")

    def _linear_flows(self, plan: Mapping[str, str]) -> dict[str, Flow]:
        """What flows through the matrices of layers that can be split, by the paths of their modules."""
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
        """What a class says that runs with these flows where nothing is computed but shapes."""
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
        """Stacks of the matrices of all experts that run through our function."""
        for path, module in self._model.named_modules():
            if not is_experts(module):
                continue
            stacks = {name: self._parameters[f"{path}.{name}"] for name in matrix_names(module)}
            names = {name: self._names[id(module._parameters[name])] for name in stacks}
            division = split_experts(module, stacks, self._all_gather, self._expert_division)
            if not division.stacks:
                raise self._error(path, division.why_not, division.alternative)
            parts = {each: replace(part, name=each) for leaf, part in division.stacks.items() for each in names[leaf]}
            self.cut_parameters |= parts
            if division.own is not None:
                self.whole_experts |= parts

    def log_split(self) -> None:
        """Logs what this rank holds."""
        rest = distinct_bytes(p for name, p in self._parameters.items() if name not in self.cut_parameters)
        experts = distinct_bytes(self._parameters[name] for name in self.whole_experts)
        cut_bytes = distinct_bytes(self._parameters.values()) - rest - experts
        own = f", {format_bytes(distinct_bytes(self.whole_experts.values()))} of {format_bytes(experts)} of experts"
        log.info(
            "devices=tensor: of %s of weights this rank holds 1/%d%s, and all of %s",
            *(format_bytes(cut_bytes), self._all_gather.count, own if experts else "", format_bytes(rest)),
        )

    def split_tables(self) -> None:
        """The embeddings and the head, which may be one matrix: then both or none."""
        model, share = self._model, self._share
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        table = table if isinstance(table, nn.Embedding) and share.divides(table.num_embeddings) else None
        head = head if isinstance(head, nn.Linear) and share.divides(head.out_features) else None
        for module in (table, head):
            is_tied = module is not None and any(len(self._names[id(each)]) > 1 for each in module.parameters())
            if module is not None and ((table is not None and head is not None) or not is_tied):
                self._cut_module(module)
        if isinstance(head, nn.Linear) and self._is_cut(head):
            split_linear(head, self._all_gather, is_input_split=False, is_output_split=False)
        if table is not None and self._is_cut(table):
            split_embedding(table, self._all_gather)

    def _is_cut(self, module: nn.Module) -> bool:
        return any(name in self.cut_parameters for tensor in module.parameters() for name in self._names[id(tensor)])

    def _cut_module(self, module: nn.Module) -> None:
        """Cuts the parameters of a module, by all names that they have."""
        for tensor in module.parameters(recurse=False):
            for name in self._names[id(tensor)]:
                found = cut_rows(self._parameters[name], self._share)
                if found is None:
                    raise self._error(repr(name), describe_unsplit(self._parameters[name]))
                self.cut_parameters[name] = found

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

    def _error(self, what: str, why: str, instead: str = "") -> ConfigError:
        others = f"take {instead}, or " if instead else "take fewer ranks, or "
        return ConfigError(f"{NOT_SPLIT.format(what, self._all_gather.count, why)}; {others}devices=sharded")


def shrink_parameters(module: nn.Module, height: int) -> None:
    """Leaves the module's parameters so many rows. Mutates the module."""
    for name, each in module._parameters.items():
        if each is not None:
            short = torch.empty(height, *each.shape[1:], dtype=each.dtype, device=each.device)
            module._parameters[name] = nn.Parameter(short, requires_grad=False)


def split_linear(module: nn.Linear, all_gather: AllGather, *, is_input_split: bool, is_output_split: bool) -> None:
    """Makes it a map to this rank's numbers. `takes_part`: what comes is a part as well, and is made whole first.
    `gives_part`: what goes on is one. Mutates the module."""
    module.out_features //= all_gather.count
    shrink_parameters(module, module.out_features)
    if is_input_split:
        module.register_forward_pre_hook(lambda _, given: (all_gather.gather(given[0]), *given[1:]))
    if not is_output_split:
        module.register_forward_hook(lambda _, given, out: all_gather.gather(cast(torch.Tensor, out)))


def split_embedding(module: nn.Embedding, all_gather: AllGather) -> None:
    """Makes it a table of this rank's rows, which looks up the others' with them. Mutates the module."""
    module.num_embeddings //= all_gather.count
    module.padding_idx = None  # matters to gradients alone, and may be another rank's
    shrink_parameters(module, module.num_embeddings)
    lookup = _EmbeddingHooks(all_gather, module.num_embeddings)
    module.register_forward_pre_hook(lookup.before)
    module.register_forward_hook(lookup.after)


class _EmbeddingHooks:
    """What lies around the look-up of token ids (B, T) in a table of `height` rows, which gives (B, T, D)."""

    def __init__(self, all_gather: AllGather, height: int):
        self._all_gather, self._num_rows, self._is_local = all_gather, height, torch.empty(0)

    def before(self, module: nn.Module, args: Any) -> tuple[Any, ...]:
        rows = args[0] - self._all_gather.index * self._num_rows
        self._is_local = (rows >= 0) & (rows < self._num_rows)
        return torch.where(self._is_local, rows, 0), *args[1:]

    def after(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return self._all_gather.sum(torch.where(self._is_local[..., None], out, torch.zeros_like(out)))
