"""The families' oracles as other JAX projects hold them: trees of arrays, written with Orbax.

What each project does to Hugging Face's weights is written out here, apart from the loader.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from safetensors.numpy import load_file
from tiny_checkpoint import ORACLE, write_tokenizer

Tree = dict[str, Any]
Tensors = dict[str, np.ndarray]


def oracle_model(family: str) -> tuple[dict[str, Any], Tensors]:
    """config.json and float32 tensors; Gemma's heads are tied, as they are in these projects."""
    folder = ORACLE if family.startswith("llama") else ORACLE.parent / family
    config = folder / f"config{family.removeprefix('llama')}.json"
    hf = json.loads((config if folder is ORACLE else folder / "config.json").read_text())
    tensors = {n: t.astype(np.float32) for n, t in load_file(folder / "model.safetensors").items()}
    if family.startswith("gemma"):
        hf["tie_word_embeddings"] = True
        del tensors["lm_head.weight"]
    if family == "qwen2":
        del hf["layer_types"]
        hf["use_sliding_window"] = False
    return hf, tensors


def write_config(folder: Path, hf: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    write_tokenizer(folder)


def save(path: Path, tree: Any, **options: Any) -> Path:
    """With Orbax's PyTree handler; `options` are its own (use_ocdbt, use_zarr3, …)."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree))
    return path


def nested(flat: dict[str, np.ndarray], separator: str = ".") -> Tree:
    """Dotted paths → nested dicts."""
    tree: Tree = {}
    for path, value in flat.items():
        *outer, last = path.split(separator)
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def layers_of(tensors: Tensors, count: int) -> list[Tensors]:
    prefix = "model.layers.{}."
    return [
        {
            name.removeprefix(prefix.format(i)): value
            for name, value in tensors.items()
            if name.startswith(prefix.format(i))
        }
        for i in range(count)
    ]


# -- MaxText ------------------------------------------------------------------------------------


def maxtext(family: str, scanned: bool, padding: int = 0, axis: int = 1) -> Tree:
    """`params` of a MaxText checkpoint; layers stacked along `axis` when `scanned`."""
    hf, tensors = oracle_model(family)
    gemma, width = family.startswith("gemma"), hf["hidden_size"]
    embedding = tensors["model.embed_tokens.weight"]
    if gemma:
        factor = np.float32(width**0.5)
        embedding = embedding * (factor if family == "gemma2" else np.float32(jnp.bfloat16(factor)))
    flat = {
        "token_embedder.embedding": np.pad(embedding, ((0, padding), (0, 0))),
        "decoder.decoder_norm.scale": tensors["model.norm.weight"] + (1 if gemma else 0),
    }
    if "lm_head.weight" in tensors:
        flat["decoder.logits_dense.kernel"] = tensors["lm_head.weight"].T
    layers = [_maxtext_layer(family, hf, t) for t in layers_of(tensors, hf["num_hidden_layers"])]
    if family == "gemma2":
        layers = [_pair(*layers[i : i + 2]) for i in range(0, len(layers), 2)]
    for name in layers[0]:
        if scanned:
            flat[f"decoder.layers.{name}"] = np.stack([layer[name] for layer in layers], axis)
        else:
            flat |= {f"decoder.layers_{i}.{name}": layer[name] for i, layer in enumerate(layers)}
    return nested(flat)


def _pair(local: Tensors, everything: Tensors) -> Tensors:
    made = {}
    for kind, layer in {"local": local, "global": everything}.items():
        for name, value in layer.items():
            module, _, rest = name.partition(".")
            made[f"{module}_{kind}.{rest}"] = value
    return made


def _maxtext_layer(family: str, hf: dict[str, Any], layer: Tensors) -> Tensors:
    width, size, gemma = hf["hidden_size"], hf["head_dim"], family.startswith("gemma")

    def heads(name: str) -> np.ndarray:
        return layer[f"self_attn.{name}_proj.weight"].T.reshape(width, -1, size)

    query, key = heads("q"), heads("k")
    if family == "llama_llama3":  # pairs side by side
        query, key = (
            np.stack(np.split(part, 2, axis=-1), -1).reshape(part.shape) for part in (query, key)
        )
    if family not in ("qwen3", "qwen3_moe", "gemma3_text"):
        query = query * hf.get("query_pre_attn_scalar", size) ** -0.5
    made = {
        "self_attention.query.kernel": query,
        "self_attention.key.kernel": key,
        "self_attention.value.kernel": heads("v"),
        "self_attention.out.kernel": layer["self_attn.o_proj.weight"].T.reshape(-1, size, width),
    }
    short = "norm" if gemma else "layer_norm"
    norms = {
        "input_layernorm": f"pre_self_attention_{short}",
        "post_attention_layernorm": f"post_self_attention_{short}",
        "pre_feedforward_layernorm": "pre_ffw_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "self_attention.query_norm",
        "self_attn.k_norm": "self_attention.key_norm",
    }
    for name, theirs in norms.items():
        if f"{name}.weight" in layer:
            made[f"{theirs}.scale"] = layer[f"{name}.weight"] + (1 if gemma else 0)
    return made | _maxtext_mlp(family, layer)


def _maxtext_mlp(family: str, layer: Tensors) -> Tensors:
    names = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
    if family == "mixtral":
        names = {"w1": "wi_0", "w3": "wi_1", "w2": "wo"}
    if family not in ("mixtral", "qwen3_moe"):
        return {f"mlp.{t}.kernel": layer[f"mlp.{n}.weight"].T for n, t in names.items()}
    theirs = {"mixtral": "MoeBlock_0", "qwen3_moe": "moe_block"}[family]
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    gate = layer[f"{block}.gate.weight"]
    made = {f"{theirs}.gate.kernel": gate.T}
    for name, their_name in names.items():
        parts = [layer[f"{block}.experts.{e}.{name}.weight"].T for e in range(len(gate))]
        made[f"{theirs}.{their_name}"] = np.stack(parts)
    return made


# -- gemma --------------------------------------------------------------------------------------


def gemma(family: str, transposed: bool = True) -> dict[str, np.ndarray]:
    """Paths with dots, below `transformer`; gate and up as [2, F, D] when `transposed`."""
    hf, tensors = oracle_model(family)
    width, size = hf["hidden_size"], hf["head_dim"]
    flat = {
        "embedder.input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm.scale": tensors["model.norm.weight"],
    }
    norms = {
        "input_layernorm": "pre_attention_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "pre_ffw_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn._query_norm",
        "self_attn.k_norm": "attn._key_norm",
    }
    for i, layer in enumerate(layers_of(tensors, hf["num_hidden_layers"])):

        def by_head(name: str, layer: Tensors = layer) -> np.ndarray:
            rows = layer[f"self_attn.{name}_proj.weight"]
            return rows.reshape(-1, size, width).transpose(0, 2, 1)

        gating = np.stack([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]])
        inner = {
            "attn.q_einsum.w": by_head("q"),
            "attn.kv_einsum.w": np.stack([by_head("k"), by_head("v")]),
            "attn.attn_vec_einsum.w": layer["self_attn.o_proj.weight"].T.reshape(-1, size, width),
            "mlp.gating_einsum.w": gating if transposed else gating.transpose(0, 2, 1),
            "mlp.linear.w": layer["mlp.down_proj.weight"].T,
        }
        for name, theirs in norms.items():
            if f"{name}.weight" in layer:
                inner[f"{theirs}.scale"] = layer[f"{name}.weight"]
        flat |= {f"layer_{i}.{name}": value for name, value in inner.items()}
    return flat


def gemma_linen(family: str) -> Tree:
    """As gemma's own checkpoints have them: modules by paths with slashes, parameters below."""
    tree: Tree = {}
    for path, value in gemma(family).items():
        module, _, parameter = f"transformer.{path}".rpartition(".")
        tree.setdefault(module.replace(".", "/"), {})[parameter] = value
    return tree


# -- NNX ----------------------------------------------------------------------------------------


def tunix(family: str) -> dict[str, np.ndarray]:
    """Paths with dots of a Tunix model's parameters."""
    hf, tensors = oracle_model(family)
    width, size = hf["hidden_size"], hf["head_dim"]
    made = {}
    for name, value in tensors.items():
        theirs = re.sub(r"^model\.", "", name).replace("self_attn.", "attn.")
        theirs = theirs.replace("norm.weight", "norm.w")
        if re.search(r"[qkv]_proj\.weight", name):
            theirs, value = theirs.replace(".weight", ".w"), value.T.reshape(width, -1, size)
        elif "o_proj" in name:
            theirs, value = theirs.replace(".weight", ".w"), value.T.reshape(-1, size, width)
        elif name.endswith(".bias"):
            theirs, value = theirs.replace("_proj.bias", "_bias"), value.reshape(-1, size)
        elif "mlp" in name:
            theirs, value = theirs.replace(".weight", ".kernel"), value.T
        elif name == "lm_head.weight":
            theirs, value = "lm_head.w", value.T
        elif name == "model.embed_tokens.weight":
            theirs = "embedder.input_embedding"
        elif name == "model.norm.weight":
            theirs = "final_norm.w"
        made[theirs] = value
    return made


def flax(family: str) -> dict[str, np.ndarray]:
    """Hugging Face's names, with the endings of Flax's Linear, Embed and norms."""
    _, tensors = oracle_model(family)
    made = {}
    for name, value in tensors.items():
        if name.endswith("norm.weight"):
            made[name.replace(".weight", ".scale")] = value
        elif name == "model.embed_tokens.weight":
            made["model.embed_tokens.embedding"] = value
        elif name.endswith(".weight"):
            made[name.replace(".weight", ".kernel")] = value.T
        else:
            made[name] = value
    return made


def nnx_state(flat: dict[str, np.ndarray]) -> Any:
    """An nnx.State with these parameters, as `nnx.split` gives one; layers are numbered."""

    def keys(path: str) -> tuple[str | int, ...]:
        return tuple(int(key) if key.isdecimal() else key for key in path.split("."))

    variables = {keys(path): nnx.Param(jnp.asarray(value)) for path, value in flat.items()}
    return nnx.from_flat_state(variables)
