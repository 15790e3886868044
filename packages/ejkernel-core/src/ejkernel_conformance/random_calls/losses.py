"""Programs of losses over a vocabulary."""

from typing import Any

import numpy as np

from ejkernel_conformance.random_calls.draws import Arrays, Drawn, Rng, dtype, given, normal, pick, poison, some, tokens

ENTRIES = (1, 2, 33, 128, 250, 1000)


def cross_entropy(rng: Rng) -> Drawn:
    """Draws a call of `fused_cross_entropy` of logits or of hidden states. Ignored tokens are poisoned."""
    t, v, kind = tokens(rng, 200), pick(rng, ENTRIES), dtype(rng)
    d = pick(rng, (16, 60, 128)) if some(rng, 0.6) else None
    soft, weighted, bias = some(rng, 0.25), some(rng, 0.3), d is not None and some(rng, 0.4)

    def values(rng: Rng) -> Arrays:
        targets = rng.integers(0, v, t).astype(np.int32)
        ignored = rng.random(t) < 0.2
        rows = poison(normal(rng, (t, d or v), kind), np.zeros(t, bool) if soft else ignored)
        arrays: Arrays = {"logits": rows}
        if d is not None:
            arrays = {"hidden": rows, "lm_head_weight": normal(rng, (d, v), kind, 2 * d**-0.5)}
        if soft:
            raw = np.exp(rng.standard_normal((t, v)))
            arrays["soft_targets"] = (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32)
        else:
            arrays["targets"] = np.where(ignored, -100, targets).astype(np.int32)
        more: Arrays = {"weights": rng.random(t).astype(np.float32)} if weighted else {}
        return {**arrays, **more, **({"lm_head_bias": normal(rng, (v,))} if bias else {})}

    options: dict[str, Any] = given(
        logit_softcap=5.0 if some(rng, 0.3) else None,
        label_smoothing=0.1 if some(rng, 0.3) else None,
        z_loss=1e-3 if some(rng, 0.3) else None,
        reduction=pick(rng, ("mean", "sum", "none")),
    )
    if some(rng, 0.4):
        options |= {"chunk_size": int(rng.integers(1, 100)), "chunk_strategy": pick(rng, ("vocab", "token", "block"))}
    return Drawn(values, options)


def kl_divergence(rng: Rng) -> Drawn:
    """Draws a call of `fused_kl_divergence`. Masked tokens are poisoned."""
    t, v, kind = tokens(rng, 200), pick(rng, ENTRIES), dtype(rng)
    masked = some(rng, 0.5)

    def values(rng: Rng) -> Arrays:
        counts = (rng.random(t) < 0.8) | (not masked)
        student, teacher = (poison(normal(rng, (t, v), kind, 2.0), ~counts) for _ in "st")
        arrays: Arrays = {"student_logits": student, "teacher_logits": teacher}
        return {**arrays, "attention_mask": counts} if masked else arrays

    return Drawn(
        values,
        {
            "direction": pick(rng, ("forward", "reverse", "jsd")),
            "temperature": pick(rng, (0.5, 1.0, 2.0)),
            "reduction": pick(rng, ("mean", "sum", "none")),
        },
    )
