"""DeepSeek V3's routing and experts: the best groups by biased sigmoid scores, and in them the best experts."""

import jax
from tests.models.recipes.shared.experts import swiglu_experts

SOURCE = "deepseek_v3.DeepseekV3MoE"
GROUPS, TOP_GROUPS, TOP_K, SCALE = 4, 2, 3, 2.5


def prefill(w, x):
    tokens = x.reshape(-1, x.shape[-1])
    routed = swiglu_experts(
        w,
        tokens,
        TOP_K,
        scores="sigmoid",
        selection_bias=w["gate.e_score_correction_bias"],
        n_groups=GROUPS,
        top_groups=TOP_GROUPS,
        normalise=True,
        scale=SCALE,
    )
    gate, up = (tokens @ w[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up"))
    return (routed + (jax.nn.silu(gate) * up) @ w["shared_experts.down_proj.weight"].T).reshape(x.shape)
