"""DeepSeek V2's latent attention, with full-rank queries as in V2 Lite; otherwise as V3's."""

from tests.models.recipes.shared.latent_attention import functions_of

SOURCE = "deepseek_v2.DeepseekV2Attention"


def project_query(w, x):
    return x @ w["q_proj.weight"].T


prefill, packed, empty_cache, decode = functions_of(project_query)
