"""Programs of attention over TurboQuant caches: in slots without tokens, norms are poisoned and codes random."""

import dataclasses

import numpy as np

from ejkernel_conformance.random_calls import pages
from ejkernel_conformance.random_calls.draws import Arrays, Drawn, Rng, normal, pick, poison, some


@dataclasses.dataclass(frozen=True)
class Format:
    """Bits of codes of keys and of values, and the rows of the projection."""

    key_bits: int
    value_bits: int
    projections: int

    def tables(self, rng: Rng, size: int) -> Arrays:
        """Returns rotation, projection and codebooks."""
        rotation, _ = np.linalg.qr(rng.normal(size=(size, size)))
        levels = {"key_codebook": 2**self.key_bits, "value_codebook": 2**self.value_bits}
        books = {name: np.sort(normal(rng, (count,), np.float32, size**-0.5)) for name, count in levels.items()}
        projection = normal(rng, (self.projections, size), np.float32)
        return {"rotation_matrix": rotation.astype(np.float32), "qjl_projection": projection, **books}

    def cache(self, rng: Rng, batch: pages.Batch, unread: np.ndarray, value: float) -> Arrays:
        """Returns pages of random codes and signs, and of norms of about the sizes that normal vectors have."""
        z, shape = batch, (batch.pages, batch.slots, batch.g)
        sizes = {
            "key_indices_pages": z.d * self.key_bits,
            "key_signs_pages": self.projections,
            "value_indices_pages": z.d * self.value_bits,
        }
        made = {name: rng.integers(0, 256, (*shape, bits // 8), dtype=np.uint8) for name, bits in sizes.items()}
        norms = {"key_norms_pages": (*shape, 2), "value_norms_pages": shape}
        return made | {
            name: poison(np.abs(normal(rng, size, np.float32, z.d**0.5)), unread, value) for name, size in norms.items()
        }


def version2(rng: Rng, writes: bool = False) -> Drawn:
    """Draws a call of `ragged_page_attention_v2_turboquant`, or of `_v3_turboquant`, which writes new codes first."""
    z = dataclasses.replace(
        pages.draw_batch(rng, decoding=False, value_size=False), d=(d := pick(rng, (32, 64, 128))), v=d
    )
    made = Format(pick(rng, (2, 3, 4)), pick(rng, (2, 3, 4)), pick(rng, (0, 32, 64)))
    sinks = some(rng, 0.3)

    def values(rng: Rng) -> Arrays:
        order = rng.permutation(len(z.lens))
        tables, unread = z.tables(rng, order)
        arrays = {"queries": pages.draw_queries(rng, z), **made.cache(rng, z, unread, np.inf if writes else np.nan)}
        arrays |= {"kv_lens": z.lens[order].astype(np.int32), "block_tables": tables}
        arrays |= {"query_start_loc": pages.query_starts(z, order), **made.tables(rng, z.d)}
        arrays |= {"softmax_aux": normal(rng, (z.h,))} if sinks else {}
        if not writes:
            return {**arrays, "num_seqs": np.int32(len(order))}
        new = {name: normal(rng, (z.rows, z.g, z.d), z.kind) for name in ("keys", "values")}
        arrays |= {name: poison(x, np.arange(z.rows) == z.rows - 1) for name, x in new.items()}
        return {**arrays, "distribution": np.array([0, 0, len(order)], np.int32)}

    options = {
        "sliding_window": int(rng.integers(1, 100)) if some(rng, 0.4) else None,
        "logits_soft_cap": float(rng.uniform(0.5, 30)) if some(rng, 0.3) else None,
        "return_lse": True if some(rng, 0.4) else None,
    }
    return Drawn(values, {name: value for name, value in options.items() if value is not None})


def version3(rng: Rng) -> Drawn:
    """Draws a call of `ragged_page_attention_v3_turboquant`."""
    return version2(rng, writes=True)
