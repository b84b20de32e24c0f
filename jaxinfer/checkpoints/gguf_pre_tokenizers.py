"""How byte-level vocabularies of GGUF files cut a text before merging: `tokenizer.ggml.pre`.

The names are llama.cpp's and the patterns those it publishes with them, in the form the models' own
tokenizers have them where that is another (llama.cpp's own lacks case folding and some classes).
A text is cut by each pattern in turn: what matches is a piece, what lies between is cut further.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.tokenizer_files import GPT2_WORDS, QWEN2_WORDS


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a name means.

    Attributes:
        splits: patterns, applied in turn.
        whole_words: a piece that is in the vocabulary is not merged.
        composed: text is put into Unicode NFC first. llama.cpp leaves that out; the models'
            own tokenizers do it.
        bos: a begin token goes before a text unless the file says otherwise.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    composed: bool = False
    bos: bool = False


_FOLDED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN = "[一-龥\u3040-\u30ff]+"  # and kana


def _cased(
    ending: str, digits: str, upper: str = _UPPER, lower: str = _LOWER, after_marks: str = r"\r\n/"
) -> str:
    """Words that begin at a change of case, as in GPT-4o's and Mistral's Tekken vocabularies."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{upper}*{lower}+{ending}|{first}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[{after_marks}]*|{_SPACES}"
    )


_LLAMA3_WORDS = "|".join((_FOLDED, _WORD, r"\p{N}{1,3}", _MARKS, _SPACES))
_GPT4O_WORDS = _cased(_FOLDED + "?", r"\p{N}{1,3}")
_KIMI_WORDS = r"\p{Han}+|" + _cased(
    _FOLDED + "?",
    r"\p{N}{1,3}",
    rf"[{_UPPER}&&[^\p{{Han}}]]",
    rf"[{_LOWER}&&[^\p{{Han}}]]",
    r"\r\n",
)
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _HAN,
    rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_LINE_ENDS_APART = rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_BLOOM_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"
# The cased letters of Unicode, as DeepSeek's first tokenizers list them. Those that Unicode
# normalization would change are escaped.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝ\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    "Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_WIDE = "[一-龥\u0800-一\uac00-\ud7ff]+"  # most scripts of Asia

_GPT2 = PreTokenizer((GPT2_WORDS,))
_GPT2_COMPOSED = PreTokenizer((GPT2_WORDS,), composed=True)
_DIGITS_APART = PreTokenizer((r"\p{N}", GPT2_WORDS))
_LLAMA3 = PreTokenizer((_LLAMA3_WORDS,), whole_words=True, bos=True)
_LLAMA3_MERGED = PreTokenizer((_LLAMA3_WORDS,))
_QWEN2 = PreTokenizer((QWEN2_WORDS,), composed=True)
_QWEN2_PLAIN = PreTokenizer((QWEN2_WORDS,))
_GPT4O = PreTokenizer((_GPT4O_WORDS,))
_BLOOM = PreTokenizer((_BLOOM_WORDS,))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("gpt-2", "gpt2", "phi-2", "gigachat", "a.x-4.0", "mellum", "jais", "trillion", "exaone4",
         "granite-docling"), _GPT2
    ),
    **dict.fromkeys(("mpt", "olmo"), _GPT2_COMPOSED),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _DIGITS_APART,
    ),
    "command-r": PreTokenizer(_DIGITS_APART.splits, composed=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3_MERGED),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2", "solar-open"), _QWEN2_PLAIN),
    "qwen35": PreTokenizer(
        (
            rf"{_FOLDED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        composed=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "tekken": PreTokenizer((_cased("", r"\p{N}"),), whole_words=True, bos=True),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O_WORDS)),
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _WIDE,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE, r"\p{N}")),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), PreTokenizer(_DEEPSEEK3)
    ),
    "spark2_5": PreTokenizer((*_DEEPSEEK3[:2], _LINE_ENDS_APART, r"\p{N}")),
    "kimi-k2": PreTokenizer((_KIMI_WORDS,)),
    "youtu": PreTokenizer(
        (
            f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_HAN}",
            _cased(_FOLDED + "?", r"\p{N}"),
        ),
        whole_words=True,
    ),
    # Turkish endings stay with their apostrophe.
    "ufakzeka": PreTokenizer(("|".join((_WORD, r"\p{N}", _MARKS, _SPACES)),)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenizer((_BLOOM_WORDS, r"\p{N}")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": PreTokenizer(
        (
            rf"{_FOLDED}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
        )
    ),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", "|".join((_FOLDED, _WORD, r"\p{N}+", _MARKS, _SPACES))), whole_words=True
    ),
    "jais-2": PreTokenizer(
        (
            "|".join(
                (_FOLDED, _WORD, r"\p{N}{1,3}", _MARKS, r"\s*[\r\n]+",
                 *(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)),
                 r"\s{1,2}(?!\S)", r"\s")
            ),
        )
    ),
}  # fmt: skip
