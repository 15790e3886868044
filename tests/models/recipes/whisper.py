"""Whisper: cross-attention of the decoder's tokens to the encoder's frames, of another number."""

from ejkernel.modules import flash_attention

SOURCE = "whisper.WhisperAttention"
HEAD_DIM, FRAMES = 8, 13


def prefill(w, x):
    """x holds the tokens, after the encoder's frames."""
    frames, tokens = x[:, :FRAMES], x[:, FRAMES:]
    query = tokens @ w["q_proj.weight"].T + w["q_proj.bias"]
    key, value = frames @ w["k_proj.weight"].T, frames @ w["v_proj.weight"].T + w["v_proj.bias"]
    query, key, value = (part.reshape(*part.shape[:2], -1, HEAD_DIM) for part in (query, key, value))
    output = flash_attention(query, key, value)
    return output.reshape(tokens.shape) @ w["out_proj.weight"].T + w["out_proj.bias"]
