"""The attention operations on dense keys, called alike."""

import ejkernel.modules as m


def blocksparse_attention(query, key, value, **options):
    """Calls `blocksparse_attention`, without a causal mask unless asked for, with heads after tokens."""
    heads_first = (x.swapaxes(1, 2) for x in (query, key, value))
    return m.blocksparse_attention(*heads_first, **{"causal": False, **options}).swapaxes(1, 2)


DENSE = {
    "flash_attention": m.flash_attention,
    "blocksparse_attention": blocksparse_attention,
    "ring_attention": m.ring_attention,
    "attention": lambda *arrays, **options: m.attention(*arrays, **options)[0],
    "scaled_dot_product_attention": m.scaled_dot_product_attention,
}
