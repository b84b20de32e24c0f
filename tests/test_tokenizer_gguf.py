"""Tokenizers built from GGUF metadata: known splits, SentencePiece's own ids, refusals by name."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from jaxinfer.checkpoints.gguf_pre_tokenizers import PRE_TOKENIZERS
from jaxinfer.checkpoints.gguf_tokenizer import build_tokenizer
from jaxinfer.tokenizer import Tokenizer

SENTENCEPIECE = Path(__file__).parent / "fixtures" / "oracles" / "sentencepiece.json"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Merges that would join anything a wrong split leaves together.
MERGES = ["1 2", "3 4", "12 34", "Ċ Ċ", ": ĊĊ", "Ġ a", "' S", ". Ċ", "ĊĊ 1", "Ġ 1"]


def byte_level(pre: str, /, **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary."""
    tokens = ["<eos>", "<think>", *ALPHABET, *dict.fromkeys(m.replace(" ", "") for m in MERGES)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.eos_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["12", "3", "4"]),  # threes from the left: 123, 4
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("gpt-2", ":\n\n1", [":", "Ċ", "Ċ", "1"]),  # the last space before a word goes with it
        ("smollm", ":\n\n1", [":", "ĊĊ", "1"]),  # digits are set apart before that rule
        ("llama-bpe", ":\n\n1", [":ĊĊ", "1"]),  # punctuation takes the line ends along
        ("qwen2", ":\n\n1", [":ĊĊ", "1"]),
        ("smollm", " 1", ["Ġ", "1"]),
        ("gpt-2", " 1", ["Ġ1"]),
        ("gpt-2", "'S", ["'", "S"]),  # only lower-case contractions are kept together
        ("llama-bpe", "'S", ["'S"]),
        ("smollm", "a a", ["a", "Ġa"]),
    ],
)
def test_splits(pre: str, text: str, wanted: list[str]) -> None:
    assert pieces(build_tokenizer(byte_level(pre)), text) == wanted


def cuts(pre: str, text: str) -> list[str]:
    """How a text is cut before merging."""
    raw = build_tokenizer(byte_level(pre)).raw
    spans = [span for _, span in raw.pre_tokenizer.pre_tokenize_str(text)]
    return [text[start:end] for start, end in spans]


CUTS = [  # text, and its pieces by name; worked out by hand from the patterns
    ("Don't", {"gpt-2 jais phi-2 smollm tekken": "Don|'t", "falcon": "Don|'|t"}),
    ("DON'T", {"gpt-2 mpt": "DON|'|T", "llama-bpe qwen2 dbrx glm4": "DON|'T"}),
    ("DON'T", {"gpt-4o": "DON'T", "tekken": "DON|'T", "deepseek-v3": "DON|'T"}),
    ("HelloWorld", {"gpt-2 llama-bpe qwen2": "HelloWorld", "gpt-4o tekken": "Hello|World"}),
    ("a/\n b", {"gpt-4o tekken": "a|/\n| b", "llama-bpe qwen2": "a|/\n| b", "gpt-2": "a|/|\n| b"}),
    ("x//\n/\n", {"gpt-4o": "x|//\n/\n", "llama-bpe": "x|//\n|/\n"}),
    ("12345", {"llama-bpe gpt-4o deepseek-v3 glm4 chatglm-bpe smaug-bpe dbrx": "123|45"}),
    ("12345", {"gpt-2 olmo jais bloom poro-chat": "12345", "falcon": "123|45"}),
    ("12345", {"tekken qwen2 smollm refact command-r exaone minerva-7b viking": "1|2|3|4|5"}),
    ("1234567", {"tiny_aya": "1|234|567", "minicpm5": "123|456|7", "deepseek-llm": "1234567"}),
    ("e = [x]", {"falcon": "e| |=| |[|x|]", "gpt-2": "e| =| [|x|]"}),
    ("a,b  c", {"bloom gpt3-finnish poro-chat viking": "a|,|b| | c", "gpt-2": "a|,|b| | c"}),
    ("\n\nx", {"deepseek-llm deepseek-coder": "\n|\n|x", "llama-bpe deepseek-v3": "\n\n|x"}),
    ("東京x", {"deepseek-v3": "東京|x", "deepseek-llm": "東京|x", "llama-bpe gpt-2": "東京x"}),
    ("東京です", {"deepseek-v3": "東京です"}),
    (" naïve été", {"deepseek-coder gpt-2": " naïve| été", "deepseek-llm": " na|ï|ve| é|t|é"}),
    ("(foo)", {"deepseek-v3 llama-bpe": "(foo|)", "gpt-2 deepseek-coder": "(|foo|)"}),
    (" ,. a", {"deepseek-llm": " ,.| a", "deepseek-v3": " ,.| a"}),
    ("कि", {"qwen35": "कि", "qwen2": "क|\u093f", "gpt-4o": "कि"}),
    ("a     b", {"jais-2": "a|    | b", "llama-bpe": "a|    | b"}),
    ("x!\n\n", {"seed-coder": "x|!|\n\n", "bailingmoe llada-moe": "x|!\n\n"}),
    ("\n\n\n", {"bailingmoe": "\n\n\n", "qwen2": "\n\n\n"}),
    ("it's", {"bailingmoe": "it|'s"}),
    ("東京です", {"kimi-k2": "東京|です", "gpt-4o": "東京です", "youtu": "東京です"}),
    ("aB東京c1234", {"kimi-k2": "a|B|東京|c|123|4", "youtu": "a|B|東京|c|1|2|3|4"}),
    ("々〇 々", {"kimi-k2": "々〇| |々"}),
    ("x/\n//\n", {"kimi-k2": "x|/\n|//\n", "gpt-4o youtu": "x|/\n//\n"}),
    ("DON'Té", {"kimi-k2": "DON'T|é", "ufakzeka": "DON|'Té"}),
    ("한국어ㄱㅏx…a", {"youtu": "한국어ㄱㅏ|x|…|a"}),
    ("a 12", {"spark2_5": "a| |1|2", "hy_v4": "a| |12"}),
    ("x!\n\n", {"spark2_5": "x|!|\n|\n", "hy_v4": "x|!\n\n"}),
    ("a 1234567 12", {"superbpe": "a |1|234|567| |12", "hy_v4": "a| |123|456|7| |12"}),
]


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        (pre, text, wanted)
        for text, by_name in CUTS
        for names, wanted in by_name.items()
        if wanted is not None
        for pre in names.split()
    ],
)
def test_cuts(pre: str, text: str, wanted: str) -> None:
    assert "|".join(cuts(pre, text)) == wanted


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_cuts_lose_nothing(pre: str) -> None:
    text = "Ünï's  코드 \r\n\t(x+=1)//\n\n 12345, I'LL 東京です 🙂 \u0301  "
    tokenizer = build_tokenizer(byte_level(pre))
    assert "".join(cuts(pre, text)) == text
    composed = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer.encode(text)) in (text, composed)


@pytest.mark.parametrize(
    ("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)]
)
def test_where_a_begin_token_is_usual(pre: str, begins: bool) -> None:
    """Files of these kinds may leave `add_bos_token` out."""
    assert (build_tokenizer(byte_level(pre, bos_token_id=0)).encode("a")[0] == 0) == begins
    denied = build_tokenizer(byte_level(pre, bos_token_id=0, add_bos_token=False))
    assert denied.encode("a")[0] != 0


def test_qwen2_composes_characters_and_others_do_not() -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    qwen2 = build_tokenizer(byte_level("qwen2"))
    gpt2 = build_tokenizer(byte_level("gpt-2"))
    assert qwen2.encode(decomposed) == qwen2.encode(composed)
    assert gpt2.decode(gpt2.encode(decomposed)) == decomposed


def test_llama_takes_a_word_of_the_vocabulary_whole() -> None:
    """A whole word wins even where merges cannot reach it."""
    metadata = byte_level("llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "xyz"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert pieces(build_tokenizer(metadata), "xyz") == ["xyz"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert pieces(build_tokenizer(metadata), "xyz") == ["x", "y", "z"]


def test_special_and_user_defined_tokens() -> None:
    tokenizer = build_tokenizer(byte_level("gpt-2", bos_token_id=0, add_bos_token=True))
    assert tokenizer.encode("<think>") == [0, 1]
    assert tokenizer.encode("<think>", add_special_tokens=False) == [1]
    assert 0 not in tokenizer.encode("<eos>", add_special_tokens=False)
    assert tokenizer.encode("<eos>", add_special_tokens=False, allow_special=True) == [0]
    assert tokenizer.decode([0, 1]) == "<think>"


def test_eos_ids_are_all_that_end_an_output() -> None:
    tokenizer = build_tokenizer(byte_level("gpt-2", eot_token_id=5, eom_token_id=0))
    assert tokenizer.eos_ids == (0, 5)


@pytest.mark.parametrize(
    ("names", "eos"),
    [
        (["<|end|>"], (0, 1)),  # Phi: the file names the end of text alone
        (["<|eot_id|>", "<|eom_id|>"], (0, 1, 2)),
        (["<|end|>", "<|return|>", "<|call|>"], (0, 2, 3)),  # gpt-oss: <|end|> ends no turn
        (["<|other|>"], (0,)),
    ],
)
def test_ends_of_turns_that_the_file_does_not_name(names: list[str], eos: tuple[int, ...]) -> None:
    metadata = byte_level("gpt-4o")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.tokens"] = [tokens[0], *names, *tokens[1:]]
    metadata["tokenizer.ggml.token_type"] = [types[0], *[3] * len(names), *types[1:]]
    assert sorted(build_tokenizer(metadata).eos_ids) == list(eos)
    metadata["tokenizer.ggml.token_type"] = [types[0], *[1] * len(names), *types[1:]]
    tokenizer = build_tokenizer(metadata)  # the same where the file calls them ordinary
    assert sorted(tokenizer.eos_ids) == list(eos)
    if eos != (0,):
        assert not {*eos} & {*tokenizer.encode(names[-1])}
        assert {*eos} & {*tokenizer.encode(names[-1], allow_special=True)}
    metadata["tokenizer.ggml.eot_token_id"] = 0
    assert build_tokenizer(metadata).eos_ids == (0,)


def test_templates_by_name() -> None:
    templates = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    tokenizer = build_tokenizer(byte_level("gpt-2") | templates)
    assert tokenizer.render_chat([]) == "D"
    assert tokenizer.render_chat([], tools=[{}]) == "T"


def sentencepiece(**changes: Any) -> dict[str, Any]:
    data = json.loads(SENTENCEPIECE.read_text())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": data["tokens"],
        "tokenizer.ggml.scores": data["scores"],
        "tokenizer.ggml.token_type": data["token_type"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize("case", json.loads(SENTENCEPIECE.read_text())["cases"])
def test_sentencepiece_ids(case: tuple[str, list[int]]) -> None:
    text, ids = case
    tokenizer = build_tokenizer(sentencepiece())
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_without_a_leading_space() -> None:
    tokenizer = build_tokenizer(sentencepiece(add_space_prefix=False, add_bos_token=False))
    with_space = build_tokenizer(sentencepiece())
    assert tokenizer.encode(" values") == with_space.encode("values")[1:]
    assert tokenizer.encode("values") != with_space.encode("values")[1:]
    assert tokenizer.decode(tokenizer.encode(" values")) == " values"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level("afmoe"), r"tokenizer\.ggml\.pre = 'afmoe' is not.*known: .*llama-bpe"),
        (byte_level("llama-bpe", model="t5"), r"tokenizer\.ggml\.model = 't5'"),
        (
            byte_level("gpt-2", pre=None),
            r"tokenizer\.ggml\.pre = '\(absent\)' does not say.*convert",
        ),
        (byte_level("default"), r"tokenizer\.ggml\.pre = 'default' does not say"),
        (byte_level("gpt-2", model="bert"), r"tokenizer\.ggml\.model = 'bert'"),
        (byte_level("gpt-2", tokens=[]), r"tokenizer\.ggml\.tokens is missing or empty"),
        (byte_level("gpt-2", merges=None), r"tokenizer\.ggml\.merges is missing"),
        (byte_level("gpt-2", merges=["ab"]), r"'ab' is not a pair"),
        (byte_level("gpt-2", merges=["a missing"]), r"tokenizer\.ggml\.merges.*missing"),
        (byte_level("gpt-2", token_type=[1]), r"tokenizer\.ggml\.token_type has 1 entries"),
        (byte_level("gpt-2", eos_token_id=999), r"EOS id 999"),
        (byte_level("gpt-2", bos_token_id=-1, add_bos_token=True), r"bos_token_id = -1"),
        (byte_level("gpt-2", add_bos_token=True), r"bos_token_id = None"),
        (sentencepiece(scores=[0.0]), r"tokenizer\.ggml\.scores"),
        (sentencepiece(unknown_token_id=4000), r"unknown_token_id = 4000"),
    ],
)
def test_what_cannot_be_built_exactly_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(metadata)
