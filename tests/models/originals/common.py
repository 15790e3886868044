"""What several original layers share: masks and rotary positions in the form that transformers passes them."""

import torch


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
