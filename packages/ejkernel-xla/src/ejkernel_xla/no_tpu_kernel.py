"""Says why TPUs have no kernel for a family, or for some of its operations, for the support matrix."""

REASONS_WITHOUT_TPU_KERNEL = {
    "attention_weights": (
        "the weights of all pairs are an output, and writing them takes more of the memory's time than computing "
        "them; `flash_attention` has a kernel, without weights"
    ),
    "expert_routing": (
        "it is one top-k and one sort of the chosen experts, without a product: XLA has both, and Mosaic has no sort"
    ),
    "gather_reduce": (
        "a copy of one bfloat16 row starts within a tile of HBM, which Mosaic does not support: arranging rows as "
        "whole tiles first takes the pass through HBM that a kernel would save"
    ),
    "dense_indexer_loss": (
        "the products run on the matrix units under XLA; a kernel that keeps their tiles in VMEM is not written"
    ),
    "indexer_loss": (
        "the rows that a query lists are separate copies from HBM, which XLA starts for a whole tile at a time; a "
        "kernel is not written"
    ),
    "kl_divergence": (
        "it reads the logits that the caller has in HBM, and XLA fuses the reductions into these passes: a kernel "
        "would read as many bytes"
    ),
    "paged_attention": (
        "the kernel needs pages of numbers: a cache without pages goes to `decode_attention` and `page_attention`, "
        "which have a kernel"
    ),
    "recurrent_network": (
        "the products of each step wait for the state before it, so that they and not the memory take the time; "
        "XLA keeps the loop in one program"
    ),
    "segment_pooling": (
        "it is one pass over the values and has no product: XLA fuses the sum and the division into this pass, and "
        "a kernel would read as many bytes"
    ),
    "wkv": ("each token has a few elementwise operations per channel and no product; a kernel is not written"),
}
"""Reasons by family. The support matrix shows them at the operations that no TPU kernel serves."""
