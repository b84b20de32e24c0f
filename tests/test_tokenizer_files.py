"""Tokenizers without a tokenizer.json: SentencePiece models and GPT-2's files, against the ids that
the library itself and transformers give (scripts/make_text_oracles)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from stated_tokens import CASES, TEXTS, write_case
from tiny_checkpoint import write_tokenizer
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import processors

from jaxinfer.checkpoints.gguf_tokenizer import build_tokenizer
from jaxinfer.sentencepiece_model import parse_model
from jaxinfer.tokenizer import Tokenizer

ORACLES = Path(__file__).parent / "fixtures" / "oracles" / "text"
PIECES = json.loads((ORACLES / "sentencepiece.json").read_text())
BYTES = json.loads((ORACLES / "byte_level.json").read_text())
CHAT = "<s>A page holds</s><s>the keys</s>"


def folder_with(folder: Path, model: str, **config: Any) -> Path:
    """A folder with a SentencePiece model and a tokenizer_config.json."""
    shutil.copy(ORACLES / f"{model}.model", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def as_gguf(model: str, **changes: Any) -> dict[str, Any]:
    """A SentencePiece model in GGUF's words."""
    pieces, scores, types = zip(*PIECES[model]["pieces"])
    keys = {"tokens": list(pieces), "scores": list(scores), "token_type": list(types)}
    keys |= {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}


# -- SentencePiece ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["bpe", "no_prefix", "unigram"])
def test_ids_are_the_librarys_own(tmp_path: Path, model: str) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, model))
    for text, ids in PIECES[model]["cases"]:
        # `<turn>` is no mark of turns that we know: like `<sep>`, users may write it.
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.eos_ids == (2,)
    assert (tokenizer.config["bos_token"], tokenizer.config["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize("model", ["bpe", "no_prefix"])
def test_gguf_metadata_gives_the_same_ids(model: str) -> None:
    spaces = {"add_space_prefix": model == "bpe"}
    tokenizer = build_tokenizer(as_gguf(model, **spaces))
    for text, ids in PIECES[model]["cases"]:
        assert tokenizer.encode(text) == [1, *ids], text


def test_gguf_vocabularies_that_do_not_name_their_begin_and_end() -> None:
    metadata = as_gguf("bpe")
    del metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.encode("A page")[0] == 1 and tokenizer.eos_ids == (2,)
    metadata["tokenizer.ggml.token_type"][1] = metadata["tokenizer.ggml.token_type"][2] = 1
    plain = build_tokenizer(metadata)
    assert plain.encode("A page")[0] != 1 and plain.eos_ids == ()


def test_models_differ_where_their_options_do(tmp_path: Path) -> None:
    """The cases would notice an option that is not followed."""
    cases = {model: dict(map(tuple_of, data["cases"])) for model, data in PIECES.items()}
    pieces = {model: [p for p, _, _ in data["pieces"]] for model, data in PIECES.items()}

    def spelled(model: str, text: str) -> list[str]:
        return [pieces[model][i] for i in cases[model][text]]

    assert spelled("bpe", "one<sep>two <sep> three<sep>").count("<sep>") == 3
    assert spelled("bpe", "A page holds")[0][0] == "▁" != spelled("no_prefix", "A page holds")[0][0]
    assert "".join(spelled("unigram", " ")) == "" != "".join(spelled("bpe", " "))
    assert "".join(spelled("unigram", "ｆｕｌｌ width")).startswith("▁full")
    assert any(piece.startswith("<0x") for piece in spelled("bpe", "emoji 🙂 and ünknown ß"))


def tuple_of(case: list[Any]) -> tuple[str, list[int]]:
    return case[0], case[1]


@pytest.mark.parametrize("legacy", [True, False])
def test_texts_between_special_tokens(tmp_path: Path, legacy: bool) -> None:
    """Where the model's space goes is the checkpoint's choice."""
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, "bpe", legacy=legacy))
    ids = tokenizer.encode(CHAT, add_special_tokens=False, allow_special=True)
    assert ids == PIECES["bpe"]["between"][str(legacy)]
    assert PIECES["bpe"]["between"]["True"] != PIECES["bpe"]["between"]["False"]


def test_white_space_after_special_tokens_stays_where_a_model_drops_it_at_a_begin(
    tmp_path: Path,
) -> None:
    """As the library itself has it after a piece that it finds first."""
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, "unigram", legacy=False))
    library = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in ("A page", " A page", "  A  page ", "\tA", " ", "holds"):
        wanted = library.encode("<sep>" + text)[2:]  # after its first space and that piece
        found = tokenizer.encode("</s>" + text, add_special_tokens=False, allow_special=True)
        assert found == [2, *wanted], text
    assert library.encode("<sep> A")[2:] != library.encode("<sep>A")[2:] != library.encode("A")


def test_gguf_tokens_of_users_are_written_as_text() -> None:
    """Converters write a space where the model has its mark, as in Gemma's runs of spaces."""
    metadata = as_gguf("no_prefix", add_space_prefix=False)
    tokens, types, scores = (
        metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores")
    )
    tokens += ["  ", "    "]
    types += [4, 4]
    scores += [0.0, 0.0]
    two, four = len(tokens) - 2, len(tokens) - 1
    tokenizer = build_tokenizer(metadata)
    plain = dict(map(tuple_of, PIECES["no_prefix"]["cases"]))["A page holds"]
    assert tokenizer.encode("    A page holds") == [1, four, *plain]
    assert tokenizer.encode("  A page holds") == [1, two, *plain]
    assert tokenizer.decode([four, *plain]) == "    A page holds"


def test_a_processors_chat_template(tmp_path: Path) -> None:
    """It lies in a file of its own, which stands where no other has one."""
    folder = folder_with(tmp_path, "bpe")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert Tokenizer.from_folder(folder).render_chat([]) == "of a processor"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of the tokenizer"}))
    assert Tokenizer.from_folder(folder).render_chat([]) == "of the tokenizer"
    for broken in ({"chat_template": 3}, {"other": ""}):
        folder_with(tmp_path, "bpe")
        (folder / "chat_template.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"chat_template\.json: .*(chat_template|other) = "):
            Tokenizer.from_folder(folder)


def test_decoding(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, "bpe"))
    for text, ids in PIECES["bpe"]["cases"]:
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("A page")) == "A page"
    assert tokenizer.decode(tokenizer.encode("A page"), skip_special_tokens=False) == "<s> A page"


def test_what_surrounds_a_text(tmp_path: Path) -> None:
    plain = Tokenizer.from_folder(folder_with(tmp_path, "bpe", add_bos_token=False))
    ids = plain.encode("A page")
    both = Tokenizer.from_folder(folder_with(tmp_path, "bpe", add_eos_token=True))
    assert both.encode("A page") == [1, *ids, 2]
    with pytest.raises(ValueError, match="add_eos_token is set, and the vocabulary lacks '<none>'"):
        Tokenizer.from_folder(folder_with(tmp_path, "bpe", add_eos_token=True, eos_token="<none>"))


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    added = {
        "400": {"content": "<|user|>", "special": True, "rstrip": True},
        "401": {"content": "<tool>", "special": False},
    }
    config = {"added_tokens_decoder": added, "additional_special_tokens": ["<turn>"]}
    config["chat_template"] = "<turn>{{ messages[0].content }}<|user|> \n{{ messages[0].content }}"
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, "no_prefix", **config))
    turn = tokenizer.raw.token_to_id("<turn>")
    special = {0, 1, 2, 3, turn, 400}
    text = "<s>A<turn>B<|user|> C<ctl><unk></s>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not special & set(ids) and tokenizer.decode(ids) == text
    asked = tokenizer.encode(text, add_special_tokens=False, allow_special=True)
    assert special <= set(asked)
    assert 401 in tokenizer.encode("<tool>")  # not special: found in any text
    in_chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert in_chat == [turn, *ids, 400, *ids]  # and `<|user|>` takes in the space after it


def test_turn_marks_that_users_may_not_write(tmp_path: Path) -> None:
    """Gemma's marks are user-defined pieces, found in any text if nobody prevents it."""
    metadata = as_gguf("no_prefix")
    tokens = metadata["tokenizer.ggml.tokens"]
    mark = tokens.index("<turn>")
    tokens[mark] = "<start_of_turn>"
    metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = build_tokenizer(metadata)
    assert mark not in tokenizer.encode("<start_of_turn>user")
    assert mark in tokenizer.encode("<start_of_turn>user", allow_special=True)
    assert tokens.index("<sep>") in tokenizer.encode("<sep>")


def test_a_sentencepiece_model_survives_saving(tmp_path: Path) -> None:
    config = {"legacy": True, "additional_special_tokens": ["<turn>"]}
    (source := tmp_path / "a").mkdir()
    for tokenizer in (
        Tokenizer.from_folder(folder_with(source, "unigram", **config)),
        build_tokenizer(as_gguf("bpe")),
    ):
        tokenizer.save(tmp_path / "saved")
        again = Tokenizer.from_folder(tmp_path / "saved")
        assert again.encode(CHAT, allow_special=True) == tokenizer.encode(CHAT, allow_special=True)
        assert again.encode("<turn> x") == tokenizer.encode("<turn> x")
        assert again.eos_ids == tokenizer.eos_ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "tokenizer.model: is no SentencePiece model: it has no pieces"),
        (b"\x0a\xff not a proto", "tokenizer.model: is no SentencePiece model"),
        (b"IQ== 0\nIg== 1\n", "tokenizer.model: is a tiktoken file"),
    ],
)
def test_broken_models_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_models_that_contradict_themselves(tmp_path: Path) -> None:
    for added, message in (
        ({"7": {"content": "<new>"}}, "'<new>' has the id 7 of the piece"),
        ({"400": {"content": "<a>", "single_word": True}}, "single_word is not supported"),
        ({"400": "<a>"}, "400 = '<a>', expected an object with a token's content"),
        ({"400": {"content": ""}}, "400: the token's content is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_folder(folder_with(tmp_path, "bpe", added_tokens_decoder=added))
    model = parse_model((ORACLES / "bpe.model").read_bytes())
    del model.pieces[10]  # one of the bytes
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="sentencepiece refuses the model"):
        Tokenizer.from_folder(tmp_path)


# -- byte-level ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "command-r", "olmo"])
def test_gguf_byte_level_ids_are_transformers(pre: str) -> None:
    merges = [" ".join(pair) for pair in BYTES["merges"]]
    metadata = {"model": "gpt2", "pre": pre, "tokens": BYTES["tokens"], "merges": merges}
    tokenizer = build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
    for text, ids in BYTES[pre]:
        assert tokenizer.encode(text) == ids, text


def gpt2_folder(folder: Path, **config: Any) -> Path:
    vocab = {token: i for i, token in enumerate(BYTES["tokens"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in BYTES["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "pre"),
    [(None, "gpt-2"), ("GPT2TokenizerFast", "gpt-2"), ("Qwen2Tokenizer", "qwen2")],
)
def test_vocab_and_merges(tmp_path: Path, kind: str | None, pre: str) -> None:
    config = {"tokenizer_class": kind, "eos_token": "<|end|>"}
    tokenizer = Tokenizer.from_folder(gpt2_folder(tmp_path, **config))
    for text, ids in BYTES[pre]:
        assert tokenizer.encode(text) == ids, text
        assert pre == "qwen2" or tokenizer.decode(ids) == text
    end = BYTES["tokens"].index("<|end|>")
    assert tokenizer.eos_ids == (end,)
    assert end not in tokenizer.encode("x<|end|>")
    assert end in tokenizer.encode("x<|end|>", allow_special=True)


def test_vocab_and_merges_with_added_tokens(tmp_path: Path) -> None:
    folder, first = gpt2_folder(tmp_path), len(BYTES["tokens"])
    (folder / "added_tokens.json").write_text(
        json.dumps({"<|im_start|>": first + 1, "<think>": first})
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<think>") == [first]
    assert first + 1 not in tokenizer.encode("<|im_start|>")  # it marks turns, said or not
    (folder / "added_tokens.json").write_text(json.dumps({"<think>": first + 5}))
    with pytest.raises(ValueError, match=rf"'<think>' has the id {first + 5}, not {first}"):
        Tokenizer.from_folder(folder)


def test_vocab_and_merges_that_are_not_known(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path, tokenizer_class="RobertaTokenizer")
    with pytest.raises(ValueError, match=r"RobertaTokenizer is not built from vocab\.json"):
        Tokenizer.from_folder(folder)
    gpt2_folder(tmp_path, add_prefix_space=True)
    with pytest.raises(ValueError, match="add_prefix_space"):
        Tokenizer.from_folder(folder)
    gpt2_folder(tmp_path)
    (folder / "merges.txt").write_text("a b\nab\n")
    with pytest.raises(ValueError, match=r"merges\.txt: '(a b|ab)'"):
        Tokenizer.from_folder(folder)
    (folder / "merges.txt").unlink()
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tekken\.json: is not read"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("config", "begins", "ends"),
    [
        ({}, True, False),  # as the tokenizer.json says
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_eos_token": True}, True, True),
        ({"add_eos_token": True, "add_bos_token": False}, False, True),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"add_bos_token": True, "bos_token": None}, False, False),
    ],
)
def test_a_config_decides_what_surrounds_a_text(
    tmp_path: Path, config: dict[str, Any], begins: bool, ends: bool
) -> None:
    """Also where the tokenizer.json says otherwise, or nothing, as DeepSeek's."""
    write_tokenizer(tmp_path)
    raw = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if not config:
        raw.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    raw.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    names["tokenizer_class"] = "LlamaTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | config))
    ids = Tokenizer.from_folder(tmp_path).encode("the")
    assert (ids[0] == 1, ids[-1] == 2) == (begins, ends)
    assert len(ids) == 1 + begins + ends
    if config:  # of other classes, the tokenizer.json alone decides
        other = names | config | {"tokenizer_class": "PreTrainedTokenizerFast"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(other))
        assert len(Tokenizer.from_folder(tmp_path).encode("the")) == 1


def test_a_config_decides_what_surrounds_a_text_of_vocab_and_merges(tmp_path: Path) -> None:
    end = BYTES["tokens"].index("<|end|>")
    config = {"bos_token": "<|end|>", "add_bos_token": True}
    assert Tokenizer.from_folder(gpt2_folder(tmp_path, **config)).encode("A")[0] == end
    gpt2_folder(tmp_path, **config | {"bos_token": "<none>"})
    with pytest.raises(ValueError, match="add_bos_token is set, and the vocabulary lacks '<none>'"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path)
    write_tokenizer(folder)
    assert Tokenizer.from_folder(folder).vocab_size == 96


# -- what the files beside a tokenizer.json say ----------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_tokens_that_other_files_state_are_transformers(tmp_path: Path, name: str) -> None:
    expected = json.loads((ORACLES / "stated.json").read_text())[name]
    tokenizer = Tokenizer.from_folder(write_case(tmp_path, name))
    tokenizer.save(tmp_path / "saved")
    for read in (tokenizer, Tokenizer.from_folder(tmp_path / "saved")):
        for text, (ids, decoded) in zip(TEXTS, expected, strict=True):
            assert read.encode(text, allow_special=True) == ids, text
            assert read.decode(ids) == decoded, text


def test_special_tokens_that_only_the_config_names_are_text_to_users(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_case(tmp_path, "additional"))
    start = tokenizer.raw.token_to_id("<|im_start|>")
    assert tokenizer.encode("<|im_start|>user", allow_special=True)[0] == start
    assert start not in tokenizer.encode("<|im_start|>user")


def test_an_id_that_the_vocabulary_gives_to_another_token(tmp_path: Path) -> None:
    write_case(tmp_path, "nothing")
    entry = {"content": "<tool>", "special": True}
    for i in (5, 999):
        config = {"added_tokens_decoder": {str(i): entry}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=rf"tokenizer.json: the added token '<tool>' .* {i}"):
            Tokenizer.from_folder(tmp_path)
