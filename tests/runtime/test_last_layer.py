"""Behind the keys and values of the last layer only tokens go on that somebody asks for, and they come to the same."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from greenlet import GreenletExit, getcurrent
from transformers import AutoModelForCausalLM

from runtime.cache.paged import PagedKV
from runtime.cache.pages import KVPages
from runtime.config.settings import SamplingConfig, Tier
from runtime.events import LaneRun
from runtime.model import stages
from runtime.model.stages import forward_selected
from runtime.sequences.sampler import Sampler
from runtime.sequences.sequence import Sequence as Running
from runtime.stream.device import ComputeDevice
from tests.runtime.test_families import References, Runtimes, config_for, tokens

WIDTH = 8


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("family", ["llama", "gemma-3", "deepseek-v3", "mixtral", "gpt-oss"])
def test_logits_are_those_of_all_tokens_together(
    family: str, chunk: int, reference: References, opened: Runtimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, found, narrowed = reference(family), list[dict[str, torch.Tensor]](), list[int]()
    draw, narrow = Sampler.sample, PagedKV.restrict_to_selected
    monkeypatch.setattr(PagedKV, "restrict_to_selected", lambda cache: narrowed.append(len(found)) or narrow(cache))

    def keep(sampler: Sampler, sequences: Sequence[Running], logits_BV: torch.Tensor) -> torch.Tensor:
        found[-1] |= {f"{s.request.id} {len(s.generated)}": row for s, row in zip(sequences, logits_BV, strict=False)}
        return draw(sampler, sequences, logits_BV)

    monkeypatch.setattr(Sampler, "sample", keep)
    for forward in (forward_selected, lambda layer, args, kwargs: layer(*args, **kwargs)):
        monkeypatch.setattr(stages, "forward_selected", forward)
        found.append({})
        tokens(opened(config_for(ref, Tier.none, prefill_chunk_tokens=chunk)), ref.prompts)
    few, plain = found
    assert set(narrowed) == {1}
    assert few.keys() == plain.keys()
    assert len(plain) > len(ref.prompts)
    for name, logits_V in plain.items():
        torch.testing.assert_close(few[name], logits_V, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "chunk"), [("llama", 512), ("gemma-3", 7)])
def test_several_tokens_of_a_prompt_may_be_asked_for(
    family: str, chunk: int, reference: References, opened: Runtimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever passes they fall in; the logits are the class's own."""
    ref, found, narrowed = reference(family), dict[str, list[torch.Tensor]](), list[int]()
    draw, tell, narrow = Sampler.sample, Sampler.accept, PagedKV.restrict_to_selected
    monkeypatch.setattr(
        PagedKV, "restrict_to_selected", lambda cache: narrowed.append(max(cache._selected)) or narrow(cache)
    )
    monkeypatch.setattr(
        Running, "num_selected", lambda s, new: max(0, s.num_cached + new - max(s.num_cached, s.num_known - 3))
    )

    def keep(sampler: Sampler, sequences: Sequence[Running], logits_BV: torch.Tensor) -> torch.Tensor:
        for sequence, logits_V in zip(sequences, logits_BV, strict=False):
            found.setdefault(sequence.request.id, []).append(logits_V)
        return draw(sampler, sequences, logits_BV)

    def accept_the_last(sampler: Sampler, sequences: Sequence[Running], drawn: torch.Tensor, step: int) -> None:
        last = {id(s): row for row, s in enumerate(sequences) if s.num_cached == s.num_known}.values()
        tell(sampler, [sequences[row] for row in last], drawn[list(last)], step)

    monkeypatch.setattr(Sampler, "sample", keep)
    monkeypatch.setattr(Sampler, "accept", accept_the_last)
    one = SamplingConfig(max_new_tokens=1)
    tokens(opened(config_for(ref, Tier.none, one, prefill_chunk_tokens=chunk)), ref.prompts)
    assert max(narrowed) > 1
    model = AutoModelForCausalLM.from_pretrained(ref.directory, dtype=torch.float32).eval()
    for row, prompt in enumerate(ref.prompts):
        with torch.inference_mode():
            expected_TV = model(torch.tensor([prompt])).logits[0, -3:]
        torch.testing.assert_close(torch.stack(found[str(row)]), expected_TV, rtol=1e-4, atol=1e-4)


class Layer(torch.nn.Module):
    """Stores what it gets and attends to nothing."""

    layer_idx = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x_1TD: torch.Tensor, beside: object, past_key_values: PagedKV) -> tuple[torch.Tensor, str]:
        kv_1HTD = x_1TD[:, None]
        past_key_values.update(kv_1HTD, kv_1HTD, self.layer_idx)
        self.seen.append(x_1TD.shape[1])
        return 2 * x_1TD, "beside"


@pytest.fixture
def cache() -> PagedKV:
    """Of two rows, of which 4 and 3 tokens are in the pass and the first one asks."""
    found = PagedKV(KVPages(4, ComputeDevice("cpu")))
    found.table.add()
    found.table.add()
    found.begin_pass([4, 3], [1, 0])
    return found


def ran(layer: Layer, cache: PagedKV, beside: object) -> torch.Tensor:
    x_1TD = torch.arange(7.0 * WIDTH).view(1, 7, WIDTH)
    outs: list[Any] = []
    LaneRun(
        lambda: outs.append(forward_selected(layer, (x_1TD,), {"beside": beside, "past_key_values": cache})), cache
    ).switch()
    out_1TD, name = outs[0]
    assert name == "beside"
    assert out_1TD.shape == x_1TD.shape
    torch.testing.assert_close(out_1TD[:, 3], 2 * x_1TD[:, 3])
    kv = cache.layer(0, x_1TD[:, None], x_1TD[:, None])
    torch.testing.assert_close(kv.layout.new_T.gather(kv.k_NPHD)[:, 0], x_1TD[0])
    return out_1TD


def test_tokens_that_nobody_asks_for_are_stored_and_go_no_further(cache: PagedKV) -> None:
    """Whatever holds what is said of tokens."""
    layer = Layer()
    out_1TD = ran(layer, cache, ({"angles": (torch.zeros(1, 7, 2), torch.zeros(7))}, [None, torch.zeros(3)]))
    assert layer.seen == [1]
    assert not out_1TD[:, [0, 1, 2, 4, 5, 6]].any()


@pytest.mark.parametrize("shape", [(3, 1, 7), (7, 7), (1, 1, 7, 7)])
def test_what_is_not_said_by_token_keeps_them_together(shape: tuple[int, ...], cache: PagedKV) -> None:
    layer = Layer()
    ran(layer, cache, torch.zeros(shape))
    assert layer.seen == [7]


def test_a_layer_that_stores_nothing_has_all_tokens(cache: PagedKV) -> None:
    run: Callable[[torch.Tensor], torch.Tensor] = lambda x: x + 1  # noqa: E731
    module = torch.nn.Identity()
    module.forward = run  # pyright: ignore[reportAttributeAccessIssue]
    outs: list[torch.Tensor] = []
    LaneRun(lambda: outs.append(forward_selected(module, (torch.ones(1, 7, WIDTH),), {})), cache).switch()
    torch.testing.assert_close(outs[0], torch.full((1, 7, WIDTH), 2.0))


def test_rows_that_are_not_in_the_pass_stay_where_they_are(cache: PagedKV) -> None:
    cache.end_pass()
    cache.table.add()
    cache.begin_pass([1, 0, 4], [1, 0, 1])
    with cache.restrict_to_selected():
        assert cache.decoding is not None
        assert (cache.decoding.rows, cache.decoding.past, cache.segments) == ((0, 2), (4, 3), [])
        assert cache.get_seq_length(0).tolist() == [4, 2]  # pyright: ignore[reportAttributeAccessIssue]
    assert [segment.row for segment in cache.segments] == [2]


def test_a_pass_that_is_given_up_in_the_layer_is_whole_again(cache: PagedKV) -> None:
    class Parking(Layer):
        def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, str]:
            out = super().forward(*args, **kwargs)
            getcurrent().parent.switch()
            return out

    arguments = {"beside": None, "past_key_values": cache}
    run = LaneRun(lambda: forward_selected(Parking(), (torch.zeros(1, 7, WIDTH),), arguments), cache)
    run.switch()
    assert len(cache.segments) == 0
    run.throw(GreenletExit)
    assert [segment.new for segment in cache.segments] == [4, 3]
    cache.update(torch.zeros(1, 1, 7, WIDTH), torch.zeros(1, 1, 7, WIDTH), Layer.layer_idx)


def test_where_most_tokens_are_asked_for_none_is_left_out(cache: PagedKV) -> None:
    layer = Layer()
    cache.begin_pass([1, 2], [1, 1])
    x_1TD = torch.ones(1, 3, WIDTH)
    LaneRun(lambda: forward_selected(layer, (x_1TD, None), {"past_key_values": cache}), cache).switch()
    assert layer.seen == [3]
