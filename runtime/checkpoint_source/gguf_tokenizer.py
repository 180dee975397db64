"""Builds the tokenizer of a GGUF file. transformers reads vocabulary and merges; this module adds the pre-tokenization
rule, of which the file has only the name (`tokenizer.ggml.pre`).

The names and rules are defined by llama.cpp: https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp, as of November
2026 (00ad355). If a comment there quotes the regular expression of the model's own tokenizer.json, the quoted one is
used.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..errors import CheckpointError
from ..store.gguf import GgufHeader, quick_gguf_package
from .download import as_checkpoint_error

log = logging.getLogger(__name__)

MODEL, PRE, BOS = (f"tokenizer.ggml.{key}" for key in ("model", "pre", "bos_token_id"))
BYTE_LEVEL = "gpt2"  # the kind of vocabulary that needs a pre-tokenization rule


@dataclass(frozen=True)
class SplitRule:
    """A pre-tokenization rule. Each regular expression of `splits` divides all texts that the previous one produced
    into matches and the texts between them. `ignores_merges`: a resulting text that is in the vocabulary becomes one
    token, without applying merges. `adds_bos`: prompts begin with BOS unless the file says otherwise."""

    splits: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


def _any(*kinds: str) -> str:
    return "|".join(kinds)


# Parts of the regular expressions, and expressions that several rules share, named by the model that introduced them.
SUFFIX, APOSTROPHES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'s|'t|'re|'ve|'m|'ll|'d"
BEGIN = r"[^\r\n\p{L}\p{N}]?"
WORD, DIGIT, DIGITS = BEGIN + r"\p{L}+", r"\p{N}", r"\p{N}{1,3}"
SIGNS, LINES, SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (f"{BEGIN}{UPPER}*{LOWER}+", f"{BEGIN}{UPPER}+{LOWER}*")
CASED_SUFFIXED = tuple(f"{words}{SUFFIX}?" for words in CASED)
PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
GPT2 = _any(APOSTROPHES, r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", SPACES)
LLAMA3, QWEN2 = (_any(SUFFIX, WORD, digits, SIGNS, LINES, SPACES) for digits in (DIGITS, DIGIT))
QWEN35 = _any(SUFFIX, BEGIN + r"[\p{L}\p{M}]+", DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", LINES, SPACES)
GPT4O = _any(*CASED_SUFFIXED, DIGITS, PATHS, LINES, SPACES)
HAN, HAN_KANA = "\u4e00-\u9fa5", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
HAN_HANGUL = f"[{HAN}\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK3 = _any(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*", LINES, SPACES,
)  # fmt: skip
DEEPSEEK_LETTERS = (  # the cased letters of Unicode when its rule was written
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
YOUTU = _any(
    "[\uac00-\ud7a3\u3131-\u318e]+",
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+",
    "[\u3105-\u312f]+",
    HAN_KANA,
)
JAIS2_SPACES = _any(*(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")), r"\s{1}")
RULES: Mapping[SplitRule, str] = {  # rule -> its names in `tokenizer.ggml.pre`, separated by spaces
    SplitRule((GPT2,)): (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion "
        "granite-docling exaone4"
    ),
    SplitRule((DIGIT, GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    SplitRule((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")): "falcon",
    SplitRule((LLAMA3,), ignores_merges=True, adds_bos=True): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    SplitRule((LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    SplitRule((QWEN2,)): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    SplitRule((QWEN35,)): "qwen35",
    SplitRule((_any(*CASED, DIGIT, PATHS, LINES, SPACES),), ignores_merges=True, adds_bos=True): "tekken",
    SplitRule((GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    SplitRule((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)): "tiny_aya cohere2moe",
    SplitRule(
        (
            "[\r\n]", rf"\s?[{DEEPSEEK_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$", HAN_HANGUL, r"\p{N}+",
        )
    ): "deepseek-llm",
    SplitRule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_HANGUL, DIGIT)): "deepseek-coder",
    SplitRule((DIGITS, HAN_KANA, DEEPSEEK3)): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    SplitRule((BLOOM,)): "bloom poro-chat gpt3-finnish",
    SplitRule((BLOOM, DIGIT)): "viking",
    SplitRule((YOUTU, _any(*CASED_SUFFIXED, DIGIT, PATHS, LINES, SPACES)), ignores_merges=True): "youtu",
    SplitRule((_any(SUFFIX, WORD, DIGITS, SIGNS, LINES, JAIS2_SPACES),)): "jais-2",
    SplitRule((DIGITS, _any(SUFFIX, WORD, r"\p{N}+", SIGNS, LINES, SPACES)), ignores_merges=True): "minicpm5",
    SplitRule((_any("'(?i:[sdmt]|ll|ve|re)", WORD, DIGIT, SIGNS, r"\s*[\r\n]", SPACES),)): (
        "bailingmoe bailingmoe2 llada-moe"
    ),
    SplitRule((_any(SUFFIX, WORD, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", LINES, SPACES),)): "seed-coder",
    SplitRule(("[^\n]+|\n+", QWEN2)): "laguna",
    SplitRule(
        (
            _any(
                SUFFIX, BEGIN + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", DIGIT, r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                r"\s*[\r\n]", SPACES,
            ),
        )
    ): "exaone-moe",
}  # fmt: skip
BY_NAME: Mapping[str, SplitRule] = {name: rule for rule, names in RULES.items() for name in names.split()}


def load_gguf_tokenizer(path: Path, header: GgufHeader, error_prefix: str) -> PreTrainedTokenizerBase:
    """Builds the tokenizer of a GGUF file. Raises CheckpointError if it cannot be built, or if the pre-tokenization
    rule is unknown, since a wrong rule would give wrong tokens."""
    rule = _find_split_rule(path, header)
    options = {"add_bos_token": True} if rule is not None and rule.adds_bos and BOS in header.metadata else {}
    with TemporaryDirectory(prefix="weightstream-") as view, as_checkpoint_error(error_prefix), quick_gguf_package():
        (Path(view) / path.name).symlink_to(path.absolute())
        tokenizer = AutoTokenizer.from_pretrained(view, gguf_file=path.name, padding_side="left", **options)
        if rule is not None:
            backend = tokenizer.backend_tokenizer
            splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in rule.splits]
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
            backend.model.ignore_merges = rule.ignores_merges
    return tokenizer


def _find_split_rule(path: Path, header: GgufHeader) -> SplitRule | None:
    """Finds the file's pre-tokenization rule. Returns None if the file names no rule or its vocabulary needs none."""
    if header.metadata.get(MODEL) != BYTE_LEVEL:
        return None
    name = str(header.metadata.get(PRE, "default"))
    if name == "default":
        log.warning(
            "%s does not name its pre-tokenization rule (%s): using GPT-2's; if the model has another, set "
            "model.tokenizer=DIR_OR_HUB_ID to its tokenizer",
            path, PRE,
        )  # fmt: skip
        return None
    if name not in BY_NAME:
        raise CheckpointError(
            f"{path}: {PRE}={name!a:.60}: unknown pre-tokenization rule; set model.tokenizer=DIR_OR_HUB_ID to the "
            "model's own tokenizer"
        )
    return BY_NAME[name]
