"""BERT: every token attends to every other."""

from ejkernel.modules import flash_attention

SOURCE = "bert.BertSelfAttention"
HEAD_DIM = 8


def prefill(w, x, cu_seqlens=None):
    query, key, value = (
        (x @ w[f"{name}.weight"].T + w[f"{name}.bias"]).reshape(*x.shape[:2], -1, HEAD_DIM)
        for name in ("query", "key", "value")
    )
    return flash_attention(query, key, value, cum_seqlens_q=cu_seqlens).reshape(x.shape)


packed = prefill
