"""DeepSeek V3's latent attention: a low-rank query, and keys and values that are projections of a latent vector."""

from tests.models.recipes.common import rms_norm
from tests.models.recipes.shared.latent_attention import functions_of

SOURCE = "deepseek_v3.DeepseekV3Attention"


def project_query(w, x):
    return rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T


prefill, packed, empty_cache, decode = functions_of(project_query)
