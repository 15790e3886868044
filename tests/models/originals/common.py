"""What the original layers share: drawn weights, and masks and rotary positions in the form that transformers takes."""

import numpy as np
import torch

GROUPED_QUERIES = dict(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, attn_implementation="eager"
)
LATENT_ATTENTION = dict(
    hidden_size=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    attn_implementation="eager",
)
GATED_DELTA = dict(
    hidden_size=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
WINDOW_LAYERS = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
LINEAR_LAYERS = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
"""Fields of the configurations of several models."""


def causal_mask(tokens: int, window: int | None = None) -> torch.Tensor:
    """The additive mask [1, 1, tokens, tokens] of causal attention, over the newest `window` keys if that is given."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    allowed = key <= query
    if window is not None:
        allowed &= query - key < window
    return torch.zeros(1, 1, tokens, tokens).masked_fill(~allowed, torch.finfo(torch.float32).min)


def rotary(embedding: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the positions of x [B, T, width], from the model's own rotary embedding."""
    return embedding(x, torch.arange(x.shape[1])[None])


def draw(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Normal numbers that bfloat16 holds exactly, float32."""
    drawn = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
    return torch.from_numpy(drawn).to(torch.bfloat16).float()


def initialise(layer: torch.nn.Module, rng: np.random.Generator) -> None:
    """Draws every parameter; those that the layer's own initialisation gives a meaning are kept, rounded.

    Matrices get a variance of 1 / fan-in. Vectors (norms, biases, gates) are moved a little from where they are, so
    that a factor of one or a bias of zero is not mistaken for none.
    """
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim > 1:
                parameter.copy_(draw(rng, tuple(parameter.shape), parameter.shape[-1] ** -0.5))
            else:
                moved = parameter + draw(rng, tuple(parameter.shape), 0.1)
                parameter.copy_(moved.to(torch.bfloat16).float())


def initialise_router(layer: torch.nn.Module, router: torch.nn.Module, rng: np.random.Generator) -> None:
    """Draws every parameter of a layer of experts, the logits far apart, so that rounding changes no choice."""
    initialise(layer, rng)
    with torch.no_grad():
        router.weight.mul_(4)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Calls a layer that takes nothing but x; other layers have a `call` of their own."""
    return layer(x)
