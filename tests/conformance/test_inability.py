"""A pinned `platform=` is refused for what the kernels cannot do, and for nothing else: speed is for priorities."""

import re

import pytest

from ejkernel.ops.device import find_device, target_device
from ejkernel.ops.dispatch import hardware_refusals, refusals
from ejkernel.ops.plugins import registry
from ejkernel_conformance.subjects import abstract_record

N = r"[\d.]+"
INABILITY = {
    "an optional argument that the kernels do not read": r"\w+ is not handled",
    "a dtype that they do not load or convert": "|".join(
        [
            r"dtype \S+ is not among [\w, ]+",
            r"rhs has dtype \S+( and lhs \S+)?; the kernel wants .*",
            r"the cache has dtype .* and the queries \S+; the kernel wants the same",
            r"\w+: dtype \S+, wants \S+",
            r"\w+: got [\w ]+, the kernels? (reads?|writes|computes in) [\w', ]+",
            r"query: got other dtypes of key or value, wants one dtype instead of [\w, ]+",
        ]
    ),
    "a head size, or a number of channels, that they are not compiled for": "|".join(
        [
            r"head size [\d, ]+ is not in .*",
            r"head sizes? [\d and]+ are not multiples of \d+",
            rf"head dimensions are {N} of keys and {N} of values; the kernel wants .*",
            rf"keys have {N} columns and values {N}; the kernel wants .*",
            rf"latent vectors have {N} and {N} rotary columns; the kernel wants .*",
            rf"value has head dimension {N} and query {N}; the kernel wants .*",
            rf"the queries have {N} heads; the kernel wants .*",
            rf"\w+: got head dimension {N}, the kernel wants (one of [\d, ]+|a multiple of {N})",
            rf"value: got head dimension {N}( of {N} heads that {N} share)?, the kernels of gradients want {N} and {N}",
            rf"\w+: got head dimension {N} and, of value, {N}, the kernel reads multiples of {N}",
            rf"\w+: got {N} channels, the kernel wants a multiple of {N}",
            rf"value: got head size {N}, wants that of query and key, {N}",
            rf"{N} heads are no multiple of {N}",
            rf"query: got {N} heads, the kernel is compiled for {N} and {N}",
        ]
    ),
    "a function of pairs that they cannot compute for a tile": "|".join(
        [
            r"(score|mask)_mod: got an array \S+ indexed by query and key together, the kernels index arrays by one .*",
            r"(score|mask)_mod: got [\w, ]+ of both query and key or of the score, which the kernels do not have",
            rf"(score|mask)_mod: got {N} values of a head, query or key, the kernels take at most {N}",
            r"(score|mask)_mod: has the operation \w+, which the kernels do not have",
            r"(score|mask)_mod: computes with all of an array \S+ for every pair",
            r"(score|mask)_mod: (computes \w+ of|reads an array of) [\w ]+, the kernels (have|load) [\w, ]+",
            rf"(score|mask)_mod: takes {N} elements of an array at once, the kernels load single ones",
            r"score_mod: has another derivative by the score than 1, which the kernels do not combine with dropout",
            r"score_mod: reads an array of \w+ as it is; the kernels sum gradients of float32",
            r"score_mod: reads an array by the score; the kernels sum its gradients by query or key",
            rf"score_mod: got {N} elements of arrays, with those of mask_mod; the kernels reach {N}",
            r"score_mod: reads an array by query and key together; the kernels sum its gradients by one of them",
        ]
    ),
    "rows that do not begin where copies can, or do not fill a tile": "|".join(
        [
            rf"{N} (columns|rows|contracted elements|channels)[\w ]* are (not a|no) multiple of {N}(, or .*)?",
            rf"rows of {N}( and {N})? (scales|numbers|elements)( of \S+)? are (not|no) multiples of {N} bytes",
            rf"\w+: got rows of {N}[\w, ]*, the kernels? reads? multiples of {N} bytes",
            rf"w: got {N} columns, the kernels have a multiple of {N}",
            rf"lhs has {N} rows; the kernel wants .*",
            rf"a device has {N} rows to exchange; the kernel wants a multiple of {N}",
            rf"the (contracted axis of (lhs|x)|output axis of (rhs|y)) has {N} elements; the kernel wants .*",
            rf"rhs (has {N} columns|gives {N} output columns); the kernel wants .*",
            rf"[lr]hs_scale has a scale per {N} contracted elements; the kernel wants .*",
            rf"the cache has {N} slots per sequence; the kernel wants .*",
            rf"a page has {N} slots; the kernel wants .*",
            rf"key: got pages of {N} slots of \w+, wants a multiple of {N} that divides {N}, or a multiple of {N}",
            rf"key: got rows or pages of {N} tokens and blocks of {N}, wants a common divisor of at least {N} .*",
            rf"key_pages: {N} rows of \S+ per token do not fill (words|tiles); wants .*",
            rf"key_pages: pages of {N} slots of codes; wants .*",
            rf"key_pages: (keys|values|signs) of {N} codes of {N} bits; wants .*",
            rf"key_pages: (keys|values|signs) of {N} bytes, which XLA stores along lanes; wants .*",
        ]
    ),
    "codes that they do not unpack": "|".join(
        [
            rf"mode: got \w+ codes of {N} bits, the kernels multiply affine codes of {N} bits",
            rf"bits(: got)? {N}[,:] the kernels (take|unpack) codes of 4 and 8",
            rf"group_size: got {N}, (without transpose the kernels have|the kernels have at least) {N}",
            r"lhs_scale or rhs_scale is None; the kernel wants both",
            r"transpose_rhs is False; the kernel wants True, as WGMMA reads .*",
        ]
    ),
    "a cache of another kind": "|".join(
        [
            "kv_cache: got a cache of latent vectors, the kernel reads keys and values",
            "the cache has latent vectors: .*",
            "the cache has separate keys and values; the kernel wants latent vectors",
            "the cache has latent vectors; the kernel wants separate keys and values",
            "block_tables: got a paged cache, the kernel reads a dense one .*",
            "query: got packed rows or pages without a table, the kernel reads one row .*",
        ]
    ),
    "more tokens or rows than the kernels loop over": "|".join(
        [
            rf"queries: got {N} rows of {N} sequences, the kernel serves at most one each",
            rf"\w+: {N} tokens of {N} sequences; the decode step supports at most {N} tokens per sequence",
            rf"\w+: one of {N} packed sequences may have .*",
            rf"x: got {N} rows, the kernels have at most {N}",
            rf"query: got {N} queries per row, the kernel takes at most {N}",
            rf"query: got {N} tiles of {N} queries, the kernel takes at most {N}",
            rf"query: got {N} words of lists and pages in scalar memory, the kernel takes {N}",
        ]
    ),
    "a computation that is another kernel's": "|".join(
        [
            r"beta: got None; the implementation '(triton|cuda_chunked)' serves recurrences without the delta rule",
            "score_mod: got None, needs a function for it or for mask_mod",
            "q_positions: with segment ids or a pattern, the kernel compares indices",
            "low_rank_read: got None; the implementations 'triton' and 'triton_delta' serve recurrences without it",
            rf"decay: got (None|{N} per head), wants a gate per key channel, {N} per head",
            "a shared prefix together with a window or alibi, which count from each query's own position",
            "decay: got gates per head or none, the kernel reads gates per key channel",
            r"sliding_window: .* does not end at the query's own position",
            rf"bias: shape .*, wants all {N} queries and {N} keys",
            "query: got one query and one key, cuDNN wants more",
            "parents: got trees whose states are returned, the kernel returns their outputs alone",
            "parents: got gates per key channel, the kernel reads trees with gates per head",
            "lm_head: got none, the kernels compute logits from hidden states",
            "initial_state: got transposed states, which the kernel does not read with beta or gates per key channel",
        ]
    ),
}
"""Why a kernel cannot compute a call, and the sentences that say so."""


def device_of(implementation):
    kinds = {"nvidia": "h200", "tpu": "v5e", "cpu": "cpu"}
    return next(kinds[name] for name in kinds if name in implementation.requires.devices)


IMPLEMENTATIONS = {
    (i.family, i.name): i for listed in registry().implementations.values() for i in listed if i.platform != "xla"
}


@pytest.mark.parametrize("key", sorted(IMPLEMENTATIONS), ids="-".join)
def test_a_pinned_platform_is_refused_for_inability_alone(key):
    implementation = IMPLEMENTATIONS[key]
    known = [re.compile(pattern) for pattern in INABILITY.values()]
    device, others = find_device(device_of(implementation)), {}
    with target_device(device):
        for op in registry().ops.values():
            if implementation not in registry().implementations[op.name]:
                continue
            for case in (*op.cases, *implementation.cases_of(op)):
                record = abstract_record(op, case)
                for direction in ("forward", "backward") if implementation.backward else ("forward",):
                    pinned = (record, device, implementation.platform, direction, frozenset())
                    found = set(refusals(op.family, implementation, *pinned))
                    for reason in found - set(hardware_refusals(implementation, device, direction)):
                        if not any(pattern.fullmatch(reason) for pattern in known):
                            others.setdefault(reason, f"{op.name}, {case.name}, {direction}")
    assert not others
