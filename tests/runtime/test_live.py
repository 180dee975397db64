"""Requests that arrive while others run get the tokens that they get alone, and cancelled ones leave nothing behind."""

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from runtime import PolicyConfig, Runtime, SamplingConfig
from runtime.config.settings import Admission, PolicyKind, SharePrefixes, Tier
from runtime.engine.session import Arrivals, Session
from runtime.sequences.sequence import Completion, Request
from tests.runtime.test_fidelity import config_for
from tests.support import NUM_NEW_TOKENS, Reference

References = Callable[[str], Reference]
POLICY = PolicyConfig(
    kind=PolicyKind.fixed,
    micro_batch_size=2,
    num_micro_batches=2,
    admission=Admission.continuous,
    share_prefixes=SharePrefixes.off,
    prefill_chunk_tokens=5,
)


class Script:
    """Arrivals by pass: `new[n]` enter before pass n, and `cancelled[n]` leave. Ends once nothing is left."""

    def __init__(self, new: dict[int, dict[int, Request]], cancelled: dict[int, Collection[int]] | None = None):
        self._new, self._cancelled, self._pass = new, cancelled or {}, -1
        self.num_idle = 0

    def __call__(self, is_idle: bool) -> Arrivals | None:
        self._pass += 1
        self.num_idle += is_idle
        if is_idle and self._pass > max(self._new):
            return None
        return Arrivals(self._new.get(self._pass, {}), self._cancelled.get(self._pass, ()))


def live(runtime: Runtime, longest: list[Request], script: Script) -> tuple[dict[int, list[int]], Session]:
    with runtime.open_with_backoff(longest) as (_, session):
        found: dict[int, Completion] = dict(session.live(script))
        free = session._engine.lanes.num_free_pages
        assert free == session._engine.lanes.pages.pool.num_pages, "all pages are free again"
    return {i: list(completion.token_ids) for i, completion in found.items()}, session


def requests_of(ref: Reference, runtime: Runtime) -> list[Request]:
    made = [runtime.request(str(i), prompt) for i, prompt in enumerate(ref.prompts)]
    return [request for request in made if isinstance(request, Request)]


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("tier", [Tier.nvme, Tier.none])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "t5"])
def test_requests_that_arrive_later_get_the_tokens_of_transformers(
    family: str, tier: Tier, reference: References
) -> None:
    ref = reference(family)
    resident = 0 if tier is Tier.nvme else None
    runtime = Runtime(config_for(ref, tier=tier, resident_layers=resident, policy=POLICY))
    requests = requests_of(ref, runtime)
    script = Script({0: {10: requests[0]}, 2: {11: requests[1], 12: requests[2]}, 3: dict(enumerate(requests[3:]))})
    found, _ = live(runtime, requests, script)
    order = [10, 11, 12, *range(len(requests) - 3)]
    assert [found[number] for number in order] == ref.expected
    assert script.num_idle >= 2, "it waits before the first and behind the last"


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_cancelled_requests_end_and_the_others_go_on(family: str, reference: References) -> None:
    ref = reference(family)
    runtime = Runtime(config_for(ref, tier=Tier.none, resident_layers=None, policy=POLICY))
    requests = requests_of(ref, runtime)
    all_requests = dict(enumerate(requests))
    last = len(requests) - 1  # still waits, as there are four slots
    found, _ = live(runtime, requests, Script({0: all_requests}, {2: [0, 99], 1: [last]}))
    assert found == {i: ref.expected[i] for i in range(1, last)}


def test_a_session_idles_and_goes_on(reference: References) -> None:
    ref = reference("llama")
    sampling = SamplingConfig(max_new_tokens=2, ignore_eos=True)
    runtime = Runtime(config_for(ref, policy=POLICY, sampling=sampling))
    requests = requests_of(ref, runtime)
    found, _ = live(runtime, requests, Script({0: {0: requests[0]}, 9: {1: requests[1]}, 14: {2: requests[2]}}))
    assert found == {i: ref.expected[i][:2] for i in range(3)}


def test_a_request_without_tokens_to_generate_ends_at_once(reference: References) -> None:
    ref = reference("llama")
    runtime = Runtime(config_for(ref, policy=POLICY))
    requests = requests_of(ref, runtime)
    empty = replace(requests[0], max_new_tokens=0)
    found, _ = live(runtime, requests, Script({0: {0: empty, 1: requests[1]}}))
    assert found == {0: [], 1: ref.expected[1]}
    assert len(found[1]) == NUM_NEW_TOKENS
