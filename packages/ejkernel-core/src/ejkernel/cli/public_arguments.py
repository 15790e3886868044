"""The public arguments that set the fields of an operation's record, under whose names implementations declare them."""

from ejkernel.ops.model import Op

PUBLIC_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "block_starts": ("cu_seqlens",),
    "bonus": ("u",),
    "code_bits": ("key_indices_pages", "value_indices_pages"),
    "compressed_segment_ids": ("cu_seqlens", "kv_lens"),
    "cu_seqlens": ("query_start_loc",),
    "decay": ("g", "g_gamma", "gk", "slopes", "w", "A"),
    "dropout_seed": ("dropout_rng",),
    "initial_state": ("state",),
    "inputs": ("logits", "hidden"),
    "keeps_token_states": ("return_token_states", "return_state"),
    "key": ("key_value", "w_kc", "latent_cache", "rope_cache", "k", "B"),
    "key_norms": ("key_norms_pages",),
    "key_signs": ("key_signs_pages",),
    "kv_positions": ("mask_info",),
    "kv_segment_ids": ("cum_seqlens_k", "cu_seqlens", "cu_seqlens_k", "kv_lens", "mask_info", "lengths"),
    "kv_starts": ("sequence_start",),
    "latent": ("queries_nope", "kv_cache"),
    "lengths": ("cu_seqlens",),
    "lm_head": ("lm_head_weight",),
    "logits_dtype": ("softmax_dtype",),
    "logits_soft_cap": ("logit_softcap",),
    "low_rank_read": ("b", "kk"),
    "low_rank_write": ("a", "kk"),
    "mask": ("attention_mask", "mask_info"),
    "new_key_norms": ("keys",),
    "new_key_signs": ("keys",),
    "new_keys": ("keys", "keys_values", "keys_pe"),
    "new_value_norms": ("values",),
    "new_values": ("values",),
    "num_seqs": ("distribution",),
    "pattern": ("mask_builder",),
    "q_positions": ("cu_seqlens_k", "kv_lens", "mask_info", "lengths"),
    "q_segment_ids": ("cum_seqlens_q", "cu_seqlens", "kv_lens", "mask_info", "lengths"),
    "projection": ("qjl_projection",),
    "query": ("r", "C"),
    "ranges": ("cu_seqlens",),
    "read": ("C",),
    "rotation": ("rotation_matrix",),
    "segment_ids": ("seg_ids",),
    "selected_blocks": ("block_counts",),
    "sequence_state": ("initial_state", "recurrent_state"),
    "skip": ("D",),
    "state_slots": ("state_indices",),
    "step": ("dt",),
    "student": ("student_logits",),
    "sum_over_tokens": ("reduction",),
    "transposed_states": ("initial_state",),
    "value": ("key_value", "w_vc", "latent_cache", "v", "x"),
    "value_decay": ("gv",),
    "value_norms": ("value_norms_pages",),
    "value_scale": ("v_scale",),
    "values": ("x",),
    "write": ("B",),
    "x": ("hidden_states",),
}
"""Field of a record -> the arguments that set it, in operations whose function has no argument of the field's name."""


def public_arguments(op: Op, field: str) -> tuple[str, ...]:
    """Returns the arguments of an operation's function that set a field of its record; none if no argument does."""
    if field in op.signature.parameters:
        return (field,)
    return tuple(name for name in PUBLIC_ARGUMENTS.get(field, ()) if name in op.signature.parameters)
