"""Facts of the real demo model in float32, computed once with transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from demo_model import demo_path
from tiny_checkpoint import dense_logits

from jaxinfer.checkpoints import LoadedModel, load_model

GPL3 = Path("/usr/share/common-licenses/GPL-3")
TOP_FIVE = {7042: 17.371, 260: 14.889, 4528: 13.245, 2250: 13.009, 1315: 12.952}


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model(demo_path(), dtype="float32")


def test_top_logits(demo: LoadedModel) -> None:
    tokens = demo.tokenizer.encode("The capital of France is")
    assert tokens == [504, 3575, 282, 4649, 314]
    logits = dense_logits(demo.config, demo.params, np.array(tokens, np.int32))[-1]
    best = np.argsort(-logits)[:5]
    assert list(best) == list(TOP_FIVE)
    np.testing.assert_allclose(logits[best], list(TOP_FIVE.values()), atol=0.01)


@pytest.mark.skipif(not GPL3.is_file(), reason="the text of the GPL-3 is not on this machine")
def test_mean_loss_of_a_long_text(demo: LoadedModel) -> None:
    tokens = np.array(demo.tokenizer.encode(GPL3.read_text())[:512], np.int32)
    logits = dense_logits(demo.config, demo.params, tokens)[:-1]
    losses = -jax.nn.log_softmax(logits)[np.arange(511), tokens[1:]]
    assert abs(float(losses.mean()) - 2.9356) < 0.001


def test_eos_and_template(demo: LoadedModel) -> None:
    assert demo.generation.eos_ids == (2,)
    ids = demo.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    text = demo.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(1) == 3 and ids.count(2) == 2
