"""What a self-check tells a model: a few prompts and the tokens behind them; and what transformers' `generate` makes of
it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedConfig

from ...model.excerpt import Excerpt, fill
from ...model.loading import LoadedModel
from ...model.unread import leave_unread
from ...origin.location import read_config
from ...probing.meta import build_meta_model
from ...probing.rewritten import initialize_again
from ...sequences.sampler import Sampler
from ...sequences.sequence import FinishReason, Request, Sequence
from ...weights.computed import keep_computed
from ...weights.quantization import take_quantization

PROMPT_LENGTHS = (5, 14, 9, 3)  # shorter and longer than the windows and limits of excerpts, none a multiple of a chunk
NUM_NEW_TOKENS, CHUNK_TOKENS = 8, 8
SPECIAL = ("token_id", "token_ids", "token_index")


@dataclass(frozen=True, kw_only=True)
class Dictated:
    """`tokens[id]` come behind a request's prompt, whatever the model would choose."""

    requests: tuple[Request, ...]
    tokens: Mapping[str, tuple[int, ...]]
    chunk_tokens: int = CHUNK_TOKENS


def dictated(model: LoadedModel, *, seed: int) -> Dictated | None:
    """Random tokens that mean nothing special to the class; None where its context or vocabulary has no room."""
    special = {int(i) for part in _configs(model.staged.model.config) for i in _special_ids(part)}
    ordinary = [i for i in range(min(model.shape.vocab_size, 4096)) if i not in special]
    if model.shape.context_tokens < max(PROMPT_LENGTHS) + NUM_NEW_TOKENS or not ordinary:
        return None
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(ordinary[i] for i in torch.randint(len(ordinary), (count,), generator=generator).tolist())

    requests = tuple(
        Request(id=str(row), prompt_ids=some(length), max_new_tokens=NUM_NEW_TOKENS)
        for row, length in enumerate(PROMPT_LENGTHS)
    )
    return Dictated(requests=requests, tokens={request.id: some(NUM_NEW_TOKENS) for request in requests})


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]


def _special_ids(config: PreTrainedConfig) -> Iterable[int]:
    for name, value in vars(config).items():
        if name.endswith(SPECIAL):
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))


class _Forced(LogitsProcessor):
    """Leaves `tokens[i]` alone at the i-th new token."""

    def __init__(self, tokens: tuple[int, ...], num_before: int):
        self._tokens, self._num_before = tokens, num_before

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[input_ids.shape[1] - self._num_before]] = 0.0
        return forced


@dataclass(frozen=True, kw_only=True)
class Heard:
    """The class's answers by request id: logits (T, V) of `generate` at each of the dictated tokens, and, where scores
    are asked for, the tokens' log-probabilities (T,) by one forward over prompt and tokens."""

    logits: Mapping[str, torch.Tensor]
    logprobs: Mapping[str, torch.Tensor]


@torch.no_grad()
def heard_from_generate(opened: LoadedModel, excerpt: Excerpt, told: Dictated, scores: bool = False) -> Heard:
    """Runs the class's unchanged code on dense float32 weights, each prompt by itself. `opened` is the excerpt as lanes
    have it, which says where its weights lie. May raise whatever the class raises."""
    config = read_config(opened.checkpoint.path)
    take_quantization(config)
    excerpt.shorten(config)
    model: Any = build_meta_model(config, torch.float32)
    leave_unread(model)
    keep_computed(model, opened.checkpoint.tensors.keys())
    excerpt.cut(model)
    parameters = {p.name: p for stage in opened.shape.stages for p in stage.parameters}
    fill(model, parameters, opened.checkpoint, opened.made)
    initialize_again(model)
    model.generation_config = GenerationConfig()  # beams of the class's own config are not asked for
    logits: dict[str, torch.Tensor] = {}
    logprobs: dict[str, torch.Tensor] = {}
    for request in told.requests:
        ids = torch.tensor([request.prompt_ids])
        tokens = told.tokens[request.id]
        num_before = 1 if config.is_encoder_decoder else len(request.prompt_ids)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=len(tokens),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                decoder_start_token_id=opened.start_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            ),
            logits_processor=LogitsProcessorList([_Forced(tokens, num_before)]),
        )
        logits[request.id] = torch.cat(out.logits).float()
        if scores:
            logprobs[request.id] = _logprobs(model, ids, torch.tensor([tokens]), opened.start_token_id)
    return Heard(logits=logits, logprobs=logprobs)


def _logprobs(model: Any, ids_1S: torch.Tensor, tokens_1T: torch.Tensor, start_token_id: int | None) -> torch.Tensor:
    """(T,), of one forward without a cache."""
    if start_token_id is not None:
        decoded_1T = torch.cat([torch.tensor([[start_token_id]]), tokens_1T[:, :-1]], 1)
        logits_TV = model(input_ids=ids_1S, decoder_input_ids=decoded_1T).logits[0]
    else:
        logits_TV = model(input_ids=torch.cat([ids_1S, tokens_1T], 1)).logits[0, ids_1S.shape[1] - 1 : -1]
    return logits_TV.float().log_softmax(-1).gather(-1, tokens_1T[0, :, None])[:, 0]


class Dictation(Sampler):
    """`tokens` by request id. `heard[id]` are a sequence's rows of logits (V,), float32 on the CPU, one per token."""

    def __init__(self, tokens: Mapping[str, Rows[int]]):
        self._tokens = tokens
        self.heard: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def draw(self, sequences: Rows[Sequence], logits_BV: torch.Tensor) -> torch.Tensor:
        """Where nobody asks, the head sees one all the same."""
        return logits_BV[: len(sequences)].float().view(torch.int32)

    def tell(self, sequences: Rows[Sequence], drawn: torch.Tensor, step: int) -> None:
        for sequence, logits_V in zip(sequences, drawn.view(torch.float32), strict=True):
            told, heard = self._tokens[sequence.request.id], self.heard[sequence.request.id]
            sequence.generated.append(told[len(heard)])
            heard.append(logits_V.clone())
            if len(heard) == len(told):
                sequence.finish = FinishReason.length
