"""A tiny Llama that generates tokens after prompts, one prompt at a time."""

import numpy as np
import torch
from tests.models.originals.common import initialise
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
    attn_implementation="eager",
)
LENGTHS, NEW = (5, 1, 11, 3, 7, 2, 9), 8
LEAST_LEAD = 1e-3


def generated(rng: np.random.Generator) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """The model, and its prompts and what it generates after them."""
    model = LlamaForCausalLM(CONFIG).float().eval()
    initialise(model, rng)
    prompts = [rng.integers(0, CONFIG.vocab_size, length) for length in LENGTHS]
    texts, arrays = [], {f"prompt.{n}": prompt.astype(np.int32) for n, prompt in enumerate(prompts)}
    for prompt in prompts:
        result = model.generate(
            torch.tensor(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(result.logits).topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) < LEAST_LEAD:
            raise ValueError("two logits are nearly equal: rounding would decide; draw other prompts")
        texts.append(result.sequences[0, len(prompt) :].numpy())
    return model, arrays | {"tokens": np.stack(texts).astype(np.int32)}
