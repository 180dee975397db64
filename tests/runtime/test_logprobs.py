"""Log-probabilities are those of the raw logits, whatever is done to them before a token is chosen."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime import SamplingConfig
from runtime.sequences.sequence import Completion, Request, pack_logprobs, unpack_logprobs
from tests.runtime.sampling_support import References, runtime_for

NUM_TOP = 4
TOLERANCE = 3e-5  # what the forward passes themselves differ by: logits of up to 9 in float32
SETTINGS = [
    {},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "seed": 2},
]


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_they_equal_the_log_softmax_of_transformers_output_logits(
    settings: dict[str, float], family: str, reference: References
) -> None:
    ref = reference(family)
    sampling = SamplingConfig(max_new_tokens=6, ignore_eos=True, logprobs=NUM_TOP, **settings)
    model = AutoModelForCausalLM.from_pretrained(ref.directory, dtype=torch.float32).eval()
    results = runtime_for(ref, sampling).generate(ref.prompts)
    for n, (result, prompt) in enumerate(zip(results, ref.prompts, strict=True)):
        assert isinstance(result, Completion)
        torch.manual_seed(Request(id=str(n), prompt_ids=(1,), max_new_tokens=1).seed(sampling.seed))
        warping = {key: settings[key] for key in ("temperature", "top_k", "top_p") if key in settings}
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=bool(settings),
            max_new_tokens=6,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            repetition_penalty=sampling.repetition_penalty,
            no_repeat_ngram_size=sampling.no_repeat_ngram_size,
            **warping,
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        logits = torch.cat(out.logits)
        expected = torch.log_softmax(logits, -1)
        assert list(result.token_ids) == tokens
        top = expected.topk(NUM_TOP, -1)
        same_logits = unpack_logprobs(pack_logprobs(logits, torch.tensor(tokens), NUM_TOP))
        for made, tolerance in ((same_logits, 1e-6), (result.logprobs, TOLERANCE)):
            own, values = [token.own for token in made], [list(token.top) for token in made]
            assert [list(token.top_ids) for token in made] == top.indices.tolist()
            assert own == pytest.approx(expected[range(6), tokens].tolist(), abs=tolerance)
            assert values == [pytest.approx(row, abs=tolerance) for row in top.values.tolist()]


def test_without_being_asked_for_there_are_none(reference: References) -> None:
    ref = reference("llama")
    results = runtime_for(ref, SamplingConfig(max_new_tokens=3)).generate(ref.prompts)
    assert all(isinstance(result, Completion) and result.logprobs == () for result in results)
