"""Writes one GGUF file's model in the forms that the peers of scripts/compare_peers read.

Runs in an interpreter of its own that has `gguf`, `torch`, `transformers`, `accelerate` and
`ctranslate2`. Usage:

    python make_models.py MODEL.gguf FOLDER

FOLDER gets F32.gguf, F16.gguf and Q8_0.gguf (norms stay float32), hf (float32, for transformers)
and ct2-int8 (for CTranslate2). What is there already is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

KINDS = ("F32", "F16", "Q8_0")


def write_gguf(source: Path, path: Path, kind: str) -> None:
    """The same model with its matrices in a kind."""
    reader, quantised = GGUFReader(source), GGMLQuantizationType[kind]
    architecture = reader.fields["general.architecture"].contents()
    temporary = path.with_suffix(".part")
    writer = GGUFWriter(temporary, architecture)
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        value, kinds = field.contents(), field.types
        item = kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kinds[0], sub_type=item)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        own = GGMLQuantizationType.F32 if numbers.ndim == 1 else quantised
        writer.add_tensor(tensor.name, quantize(numbers, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(path)


def write_hf(source: Path, folder: Path) -> None:
    """A Hugging Face folder in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    temporary = folder.with_name(f"{folder.name}.part")
    AutoTokenizer.from_pretrained(**where).save_pretrained(temporary)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # What was read counts as quantised, which cannot be saved; a model of the same numbers can.
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**where))
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(temporary)
    temporary.rename(folder)


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        if not (path := folder / f"{kind}.gguf").exists():
            write_gguf(source, path, kind)
            print(f"wrote {path}")
    if not (hf := folder / "hf").exists():
        write_hf(source, hf)
        print(f"wrote {hf}")
    if not (ct2 := folder / "ct2-int8").exists():
        tool = Path(sys.executable).parent / "ct2-transformers-converter"
        options = ["--model", hf, "--output_dir", ct2, "--quantization", "int8"]
        subprocess.run([tool, *options], check=True)
        print(f"wrote {ct2}")


if __name__ == "__main__":
    main()
