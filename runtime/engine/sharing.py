"""The lanes of a block, with rows in them that compute what several of its sequences begin with."""

from collections.abc import Mapping
from collections.abc import Sequence as Rows

from ..batching.prefixes import SharedPrefix, Shares, SharingRule, shared_prefixes
from ..cache.shared import SharedPages
from ..plan.placement.memory import SequenceSize
from ..sequences.sequence import Request, Sequence


def sizes_sharing(requests: Rows[Request]) -> list[SequenceSize]:
    """The sizes of all requests of a run, with what they share."""
    prompts = [request.prompt_ids for request in requests]
    found = shared_prefixes(prompts, [_most_shared(request) for request in requests])
    pairs = zip(requests, found, strict=True)
    return [request.size.behind(prefix) for request, prefix in pairs]


def _most_shared(request: Request) -> int:
    """Tokens of its prompt that it need not compute itself: somebody has to be asked for logits."""
    return len(request.prompt_ids) - max(1, request.num_scored)


def with_prefixes(
    groups: Rows[Rows[int]],
    prefixes: Rows[SharedPrefix | None],
    running: Mapping[int, Sequence],
    rule: SharingRule,
) -> list[list[Sequence]]:
    """Lanes of those of each group that are running, and before them, in the first lane that needs it, each prefix that
    they go on from. Which these are follows from all members of `groups`, running or not. Mutates `running`."""
    return [lane for part in rule.parts(groups) for lane in _lanes(part, prefixes, running, rule)]


def _lanes(
    groups: Rows[Rows[int]],
    prefixes: Rows[SharedPrefix | None],
    running: Mapping[int, Sequence],
    rule: SharingRule,
) -> list[list[Sequence]]:
    members = [i for group in groups for i in group]
    shares = Shares.among([prefixes[i] for i in members])
    prefix_of = dict(zip(members, shares.of, strict=True))
    opened = dict[SharedPrefix, SharedPages]()
    lanes = list[list[Sequence]]()
    for group in groups:
        lanes.append([])
        for i in group:
            if i in running:
                sequence, prefix = running[i], prefix_of[i]
                if prefix is not None:
                    sequence.behind = _opened(prefix, shares, sequence.request.prompt_ids, rule, opened, lanes[-1])
                lanes[-1].append(sequence)
    return lanes


def _opened(
    prefix: SharedPrefix,
    shares: Shares,
    tokens: tuple[int, ...],
    rule: SharingRule,
    opened: dict[SharedPrefix, SharedPages],
    lane: list[Sequence],
) -> SharedPages:
    """The pages of the prefix, for one more user; at the first one, which begins `tokens`, it enters the lane, behind
    those that it goes on from."""
    if prefix not in opened:
        parent = shares.parents[prefix]
        behind = _opened(parent, shares, tokens, rule, opened, lane) if parent is not None else None
        opened[prefix] = SharedPages(num_tokens=rule.num_shared(prefix), in_pass=rule.in_pass)
        lane.append(_computing(opened[prefix], tokens, behind))
    opened[prefix].num_users += 1
    return opened[prefix]


def _computing(pages: SharedPages, tokens: tuple[int, ...], behind: SharedPages | None) -> Sequence:
    """The row that computes what `tokens` begin with."""
    request = Request(id="", prompt_ids=tokens[: pages.num_tokens], max_new_tokens=0)
    return Sequence(request=request, fills=pages, behind=behind)


def filling(prefix: SharedPrefix, behind: SharedPages | None, user: Sequence, rule: SharingRule) -> Sequence:
    """The row that computes a prefix of `user` where sequences come and go: whoever asked for it holds its pages, until
    they are released once more than its users have begun."""
    pages = SharedPages(num_tokens=rule.num_shared(prefix), in_pass=rule.in_pass, num_users=1)
    if behind is not None:
        behind.num_users += 1
    return _computing(pages, user.request.prompt_ids, behind)
