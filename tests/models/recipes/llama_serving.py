"""Llama, continuous batching: chunks of prompts and single new tokens share a step, and requests join as others end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tests.models.recipes.common import rms_norm, rotate

from ejkernel.modules import chunked_prefill_paged_decode

SOURCE = "llama.LlamaForCausalLM"
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
REQUESTS, ROWS, PAGE, PAGES = 3, 8, 4, 5  # at once; rows of a step; tokens of a page; pages of a request


def step(w, caches, tokens, positions, batch):
    """The next token after each request's last row, and the caches; batch is (kv_lens, block_tables, starts)."""
    x, written = w["model.embed_tokens.weight"][tokens], []
    for index, cache in enumerate(caches):
        layer = functools.partial("model.layers.{}.{}.weight".format, index)
        normal = rms_norm(x, w[layer("input_layernorm")])
        query, key, value = (
            (normal @ w[layer(f"self_attn.{name}_proj")].T).reshape(len(x), -1, HEAD_DIM) for name in "qkv"
        )
        query, key = rotate(query[None], positions)[0], rotate(key[None], positions)[0]
        attended, *cache = chunked_prefill_paged_decode(query, key, value, *cache, *batch)
        written.append(cache)
        x = x + attended.reshape(len(x), -1) @ w[layer("self_attn.o_proj")].T
        normal = rms_norm(x, w[layer("post_attention_layernorm")])
        gate, up = (normal @ w[layer(f"mlp.{name}_proj")].T for name in ("gate", "up"))
        x = x + (jax.nn.silu(gate) * up) @ w[layer("mlp.down_proj")].T
    last = x[jnp.maximum(batch[2][1:] - 1, 0)]
    return jnp.argmax(rms_norm(last, w["model.norm.weight"]) @ w["lm_head.weight"].T, axis=-1), written


def generate(w, prompts, new_tokens):
    """Generates `new_tokens` after each prompt, a list of ids, by the largest logit."""
    run = jax.jit(functools.partial(step, w), donate_argnums=0)
    shape = (REQUESTS * PAGES, PAGE, KV_HEADS, HEAD_DIM)
    caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(LAYERS)]
    tables = np.arange(REQUESTS * PAGES).reshape(REQUESTS, PAGES)  # each slot of the batch owns its pages
    texts, waiting = [list(prompt) for prompt in prompts], list(range(len(prompts)))
    running, cached = [None] * REQUESTS, np.zeros(REQUESTS, np.int32)
    while waiting or any(request is not None for request in running):
        rows, positions, starts = [], [], [0]
        for slot in range(REQUESTS):
            if running[slot] is None and waiting:
                running[slot], cached[slot] = waiting.pop(0), 0
            text = texts[running[slot]] if running[slot] is not None else []
            end = min(len(text), cached[slot] + ROWS - len(rows)) if text else cached[slot]
            rows += text[cached[slot] : end]
            positions += range(cached[slot], end)
            cached[slot] = end
            starts.append(len(rows))
        padding = [0] * (ROWS - len(rows))
        batch = cached.copy(), tables, np.array(starts, np.int32)
        chosen, caches = run(caches, np.array(rows + padding), np.array(positions + padding), batch)
        for slot, request in enumerate(running):
            if request is not None and cached[slot] == len(texts[request]):
                texts[request].append(int(chosen[slot]))
                if len(texts[request]) == len(prompts[request]) + new_tokens:
                    running[slot], cached[slot] = None, 0
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
