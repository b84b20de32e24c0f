"""Files beside a tokenizer.json that speak of tokens; what transformers makes of them is in
fixtures/oracles/text/stated.json (scripts/make_text_oracles)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SOURCE = Path(__file__).parent / "fixtures" / "oracles" / "text" / "byte_level.json"
TURNS = ["<|im_start|>", "<|im_end|>"]  # words of the vocabulary, in some of the cases
TEXTS = [
    "a page holds <|im_end|> keys",
    "<|im_start|>user\nhi<|im_end|>",
    "x <tool> y",
    "it is  <|extra|>  ok",
    "zz new zz newer",
]
FIRST = "{first}"  # stands for the first id after the vocabulary; {second} for the next one
SECOND = "{second}"


def entry(content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, "special": special} | plain | flags


def named(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken"} | entry(content, **flags)


def config(**fields: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": fields}


# name -> (words of the vocabulary, tokens added in tokenizer.json, files beside it)
CASES: dict[str, tuple[list[str], list[dict[str, Any]], dict[str, Any]]] = {
    "nothing": (TURNS, [], config()),
    "eos": (TURNS, [], config(eos_token="<|im_end|>")),
    "eos with flags": (TURNS, [], config(eos_token=named("<|im_end|>", rstrip=True))),
    "map": (TURNS, [], {"special_tokens_map.json": {"bos_token": "<|im_start|>"}}),
    "additional": (TURNS, [], config(additional_special_tokens=TURNS)),
    "extra by name": (TURNS, [], config(extra_special_tokens={"turn": "<|im_start|>"})),
    "decoder": (
        [],
        [],
        config(added_tokens_decoder={FIRST: entry("<tool>", False), SECOND: entry("<|extra|>")}),
    ),
    "single word": (
        [],
        [],
        config(added_tokens_decoder={FIRST: entry("new", False, single_word=True)}),
    ),
    "added_tokens.json": ([], [], {"added_tokens.json": {"<tool>": FIRST, "<|extra|>": SECOND}}),
    "special after all": (
        [],
        [entry("<tool>", False)],
        config(added_tokens_decoder={FIRST: entry("<tool>")}),
    ),
    "eos after all": ([], [entry("<|im_end|>", False)], config(eos_token="<|im_end|>")),
    "space taken in": (
        [],
        [entry("<tool>")],
        config(added_tokens_decoder={FIRST: entry("<tool>", lstrip=True, rstrip=True)}),
    ),
    "space left": (
        [],
        [entry("<tool>", lstrip=True, rstrip=True)],
        config(added_tokens_decoder={FIRST: entry("<tool>")}),
    ),
    "named, its flags kept": (
        [],
        [entry("<tool>", lstrip=True)],
        config(mask_token=named("<tool>")),
    ),
}


def write_case(folder: Path, name: str) -> Path:
    """The files of a case, with the byte-level vocabulary of the other oracles."""
    words, added, files = CASES[name]
    source = json.loads(SOURCE.read_text())
    tokens = source["tokens"] + words
    merges = [tuple(pair) for pair in source["merges"]]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    for each in added:
        token = AddedToken(**each)
        (raw.add_special_tokens if token.special else raw.add_tokens)([token])
    raw.save(str(folder / "tokenizer.json"))
    for file, data in ({"tokenizer_config.json": {}} | files).items():
        if file == "tokenizer_config.json":
            data = {"tokenizer_class": "PreTrainedTokenizerFast"} | data
        text = json.dumps(data)
        quoted = file == "tokenizer_config.json"  # ids are keys there, and values elsewhere
        for i, place in enumerate((FIRST, SECOND), len(tokens)):
            text = text.replace(place if quoted else f'"{place}"', str(i))
        (folder / file).write_text(text)
    return folder
