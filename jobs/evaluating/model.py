"""The model as lm-evaluation-harness sees it: texts become token ids as its own `hf` model makes them of them, and all
requests of a kind become one run."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from runtime.errors import ConfigError

from .asking import Answerer, Generation, Target

KNOWN = frozenset({"do_sample", "temperature", "max_gen_toks", "until"})
SAMPLED = {"top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty"}


class HarnessModel(TemplateLM):
    """Asks `answerer`, which knows answers that an earlier start has got. Raises the errors of runtime.errors."""

    def __init__(self, answerer: Answerer):
        super().__init__()
        self._answerer = answerer
        model = answerer.model
        if model.tokenizer is None:
            raise ConfigError(f"{model.checkpoint.path} has no tokenizer, and tasks are texts: set model.tokenizer")
        self.tokenizer: PreTrainedTokenizerBase = model.tokenizer
        self.backend = "seq2seq" if model.start_token_id is not None else "causal"
        self.max_length = model.shape.context_tokens
        self.max_gen_toks = 256

    @property
    def eot_token_id(self) -> int:
        return self._token("eos_token")

    @property
    def prefix_token_id(self) -> int:
        return self._token("bos_token" if self.tokenizer.bos_token_id is not None else "eos_token")

    def _token(self, name: str) -> int:
        token = getattr(self.tokenizer, f"{name}_id")
        if not isinstance(token, int):
            raise ConfigError(f"the tokenizer of {self.tokenizer_name} has no {name}, which a harness needs")
        return token

    @property
    def tokenizer_name(self) -> str:
        return self._answerer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """The token ids, with the tokenizer's own special tokens where nobody says otherwise, but for a text that
        begins with the first of them."""
        if add_special_tokens is None:
            return self.tokenizer.encode(string, add_special_tokens=not self._begins(string))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _begins(self, string: str) -> bool:
        return has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """The log-probability of each target behind its context, and whether greedy decoding would give it. What is too
        long for the model loses its beginning."""
        targets = [self._target(context, target) for _, context, target in requests]
        scores = self._answerer.scored("loglikelihood", targets)
        for (pair, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, score)
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, window by window as the harness cuts them; each token once."""
        targets = [list(self._windows(instance.args[0])) for instance in requests]
        flat = [target for windows in targets for target in windows]
        scores = iter(self._answerer.scored("loglikelihood_rolling", flat))
        return [sum(next(scores).logprob for _ in windows) for windows in targets]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The completion of each context, up to the first of its stop strings. Requests with the same settings of
        sampling are one run."""
        asked = [self._generation(*instance.args) for instance in requests]
        texts: dict[int, str] = {}
        order = sorted(range(len(asked)), key=lambda index: asked[index].sampling)
        for number, (_, members) in enumerate(groupby(order, key=lambda index: asked[index].sampling)):
            indices = list(members)
            found = self._answerer.generated(f"generate_until-{number}", [asked[index] for index in indices])
            texts |= {index: self._text(ids, asked[index].stop) for index, ids in zip(indices, found, strict=True)}
        return [texts[index] for index in range(len(asked))]

    def _text(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Decoded alone as in the harness' `hf` model, whose numbers these are: a SentencePiece decoder strips a first
        space here, which `completion` has."""
        text = str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return postprocess_generated_text(text, list(stop), None)

    def _target(self, context: Sequence[int], target: Sequence[int]) -> Target:
        if self.backend == "seq2seq":  # the target is the decoder's, whose context is its own
            return Target(context_ids=tuple(context[-self.max_length :]), target_ids=tuple(target))
        ids = [*context, *target][-(self.max_length + 1) :]
        return Target(context_ids=tuple(ids[: len(ids) - len(target)]), target_ids=tuple(target))

    def _windows(self, text: str) -> Iterator[Target]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return (self._target(*make_disjoint_window(window)) for window in windows)

    def _generation(self, context: str, gen_kwargs: dict[str, object]) -> Generation:
        settings = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        most = int(str(settings["max_gen_toks"]))
        if most >= self.max_length:
            raise ConfigError(
                f"a task wants {most:,} new tokens of a model whose context has {self.max_length:,}: "
                f"harness.gen_kwargs={{max_gen_toks: ...}} says fewer"
            )
        unknown = sorted(settings.keys() - KNOWN - SAMPLED.keys())
        if unknown:
            raise ConfigError(f"a task generates with {', '.join(unknown)}, which evaluations do not know yet")
        temperature = float(str(settings.get("temperature") or 0.0)) if settings["do_sample"] else 0.0
        given = [(name, settings[key]) for key, name in SAMPLED.items() if key in settings] if temperature else []
        return Generation(
            context_ids=tuple(self.tok_encode(context)[most - self.max_length :]),
            max_new_tokens=most,
            stop=tuple(handle_stop_sequences(settings["until"], eos=eos)),  # pyright: ignore[reportArgumentType]
            temperature=temperature,
            sampling=tuple(given),
        )
