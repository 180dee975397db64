"""What one completion is worth beside one reference, between 0 and 1, by metric. Where a row has several references,
the best of them counts."""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from typing import TypeAlias

from runtime.errors import ConfigError

from .config import Metric

Score: TypeAlias = Callable[[str, str], Mapping[str, float]]  # a completion and a reference: scores by column

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MARKED = re.compile(r"####\s*\$?\s*(-?[\d,.]*\d)")
ANSWER_IS = re.compile(r"the answer is:?\s*([^\n]*)", re.IGNORECASE)
ROUGES = ("rouge1", "rouge2", "rougeL")


def exact_match(completion: str, reference: str) -> bool:
    """Equal but for white space around them, as HELM's quasi-exact tasks and BBH have it."""
    return completion.strip() == reference.strip()


def gsm8k(completion: str, reference: str) -> bool:
    """Numbers are compared as numbers, so 18 is 18.00 and 1,000 is 1000 (Cobbe et al., arXiv 2110.14168)."""
    answer, wanted = gsm8k_answer(completion), gsm8k_answer(reference)
    return answer is not None and answer == wanted


def gsm8k_answer(text: str) -> Decimal | None:
    """The number behind the first `####`, else the last number; None where there is none."""
    marked = MARKED.search(text)
    found = [marked.group(1)] if marked else NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def bbh(completion: str, reference: str) -> bool:
    """Answers without white space around them and a full stop behind them (Suzgun et al., arXiv 2210.09261)."""
    return bbh_answer(completion) == bbh_answer(reference)


def bbh_answer(text: str) -> str:
    """What follows the first `the answer is` up to the end of the line, else the whole text."""
    found = ANSWER_IS.search(text)
    return (found.group(1) if found else text).strip().removesuffix(".").strip()


def scorers(metrics: Sequence[Metric]) -> list[Score]:
    """One for each metric. Raises ConfigError where an extra is missing."""
    return [_rouge() if metric is Metric.rouge else _yes_or_no(metric) for metric in metrics]


def _yes_or_no(metric: Metric) -> Score:
    is_right = {Metric.exact_match: exact_match, Metric.gsm8k: gsm8k, Metric.bbh: bbh}[metric]
    return lambda completion, reference: {metric.value: float(is_right(completion, reference))}


def _rouge() -> Score:
    """F measures with stemming, as HELM computes them."""
    if find_spec("rouge_score") is None:
        raise ConfigError("metric=rouge needs the extra: pip install 'millrace[eval]'")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGES, use_stemmer=True)
    return lambda completion, reference: {
        name: float(score.fmeasure) for name, score in scorer.score(reference, completion).items()
    }
