"""Trains the bundled model's tokenizer: byte-level BPE on its training examples. Each digit is a token of its own."""

from itertools import islice

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from runtime.synthesize.tokenizer import SPECIAL_TOKENS, wrap_tokenizer

from .corpus import training_examples

NUM_EXAMPLES = 10_000
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] }}\n"
    "{% elif message['role'] == 'user' %}Q: {{ message['content'] }}\nA:"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
)


def train_tokenizer(vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` ids: pad, bos, eos, the 256 bytes, then the most frequent pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    examples = islice(training_examples(seed), NUM_EXAMPLES)
    tokenizer.train_from_iterator((f"{example.prompt}{example.answer}" for example in examples), trainer)
    return wrap_tokenizer(tokenizer, CHAT_TEMPLATE)
