"""TPU kernels without a TPU: predicted times, by the static profile of libtpu's schedules, for four chips.

    python benchmarks/library/tpu_static.py                      # all chips and kernels; some ten minutes
    python benchmarks/library/tpu_static.py --target v6e         # one chip
    python benchmarks/library/tpu_static.py --only grouped       # kernels whose name has the word
    python benchmarks/library/tpu_static.py --quick              # a kernel of each kind, for one chip
    python benchmarks/library/tpu_static.py --only ejkernel --update benchmarks/results/tpu_static.md

Shows ejkernel's kernels with the tiles that they choose, and those that JAX ships with blocks worth comparing with. The
bound is what the useful operations take at the chip's peak, or what has to be copied takes of its HBM, whichever is
more; the time that a link takes for what goes to another device is in a column of its own. A file to update keeps its
rows of what is not run: the estimates are the same in every run. Rings are of 8 devices.

Needs libtpu: pip install "ejkernel-pallas[aot]". What the figures mean and how good they are is on the page "TPU
kernels without a TPU".
"""

import argparse
import dataclasses
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel_pallas.tpu.profile import CHIPS, Case, Report, profile_many

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

PEERS, OURS = Path(__file__).with_name("_tpu_peers.py"), Path(__file__).with_name("_tpu_ours.py")
COLUMNS = (
    "kernel",
    "µs",
    "bound µs",
    "MFU",
    "computing µs",
    "HBM µs",
    "link µs",
    "matrix units",
    "VMEM MiB",
    "spilled",
    "reloaded",
)
BOTH = "forward and gradient"
OF_BACKWARD = re.compile("backward|bwd|dkv|dq")
"""What the names of backward kernels have, and those of forward kernels have not."""


def case(label: str, build: str, file: Path = PEERS, **kwargs: Any) -> Case:
    return Case(label=label, build=f"{file}:{build}", kwargs=kwargs)


def grouped() -> Iterable[Case]:
    """Grouped matmul and its gradients, with groups that tiles fit and groups that they do not."""
    tilings = ((512, 1024, 1024), (1024, 1024, 1024))
    for of, what in (
        ("output", "grouped matmul"),
        ("lhs", "gradient of grouped lhs"),
        ("rhs", "gradient of grouped rhs"),
    ):
        for kind, sizes in (("equal", None), ("unequal", (1500, 300, 1024, 12, 2100, 40, 1800, 1416))):
            name = f"{what}, {kind} groups"
            yield case(f"{name}, ejkernel", "experts", OURS, sizes=sizes, of=of)
            for tiling in tilings:
                label = f"{name}, JAX megablox, {'x'.join(map(str, tiling))}"
                yield case(label, "grouped_matmul", tiling=tiling, sizes=sizes, of=of)


def gated_grouped() -> Iterable[Case]:
    """Experts with a gate: the shapes of Qwen3-MoE and of GPT-OSS, and a decode batch."""
    gpt_oss = {"columns": 2880, "contracted": 2880}
    limits = {"interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 7.0}
    yield case("gated experts, F 768, ejkernel", "gated_experts", OURS, columns=768)
    yield case(
        "gated experts, F 768, plain product of both halves, ejkernel", "gated_experts", OURS, columns=768, fuse=False
    )
    yield case("gated experts, F 2880, interleaved, ejkernel", "gated_experts", OURS, **gpt_oss, **limits)
    yield case(
        "gated experts, F 2880, plain product of both halves, ejkernel", "gated_experts", OURS, **gpt_oss, fuse=False
    )
    yield case("gated experts, F 768, 8 rows an expert, ejkernel", "gated_experts", OURS, columns=768, rows=8)


def quantised() -> Iterable[Case]:
    """Quantised matmul beside the same product with weights of bfloat16."""
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("bfloat16 weights", {"mode": None}),
        ("int4", {}),
        ("int4 transposed", {"transpose": True}),
        ("int8", {"bits": 8}),
        ("nf4 transposed", {"mode": "nf4", "transpose": True}),
    )
    for m in (16, 64, 2048):
        for kind, options in kinds if m == 16 else kinds[:3]:
            yield case(f"quantised matmul, {m} rows, {kind}, ejkernel", "quantised", OURS, m=m, **options)


LATENT = (
    case("latent decode, pages, 16 heads, ejkernel", "latent_pages", OURS, queries=1, heads=16),
    case("latent decode, pages, 128 heads, ejkernel", "latent_pages", OURS, queries=1, heads=128),
    case("latent decode, dense, 16 heads, ejkernel", "latent_dense", OURS, heads=16),
    case("latent decode, dense, 128 heads, ejkernel", "latent_dense", OURS, heads=128),
    case("latent decode, two dense caches, 16 heads, ejkernel", "latent_dense", OURS, heads=16, caches=(512, 64)),
    case("latent decode, two dense caches, 128 heads, ejkernel", "latent_dense", OURS, heads=128, caches=(512, 64)),
    case("latent prefill of 256, 128 heads, ejkernel", "latent_pages", OURS, queries=256, heads=128, sequences=2),
)
GROUPED = tuple(grouped())
GATED = tuple(gated_grouped())
QUANTISED = tuple(quantised())
RINGS = tuple(
    case(f"{BOTH} of a ring, {n} KV heads, ejkernel", "ring", OURS, devices=8, kv_heads=n, gradient=True)
    for n in (8, 2)
)
COLLECTIVE = tuple(
    case(f"collective matmul of 4 devices, {kind}, ejkernel", "collective", OURS, kind=kind)
    for kind in ("all-gather", "reduce-scatter", "gradient of the weight")
)
KINDS = ("lightning", "a gate a head", "a gate a channel", "gated delta rule", "KDA", "RWKV-7")
RECURRENCES = tuple(
    case(
        f"recurrence, {kind}{', and its gradients' * gradient}, ejkernel",
        "recurrence",
        OURS,
        kind=kind,
        gradient=gradient,
    )
    for kind in KINDS
    for gradient in (False, True)
)
STEPS = tuple(
    case(
        f"decode steps of {n} token{'s' * (n > 1)} in slots, {kind}, ejkernel",
        "recurrent_steps",
        OURS,
        kind=kind,
        tokens=n,
    )
    for kind in KINDS[1:-1]
    for n in (1, 8)
) + tuple(
    case(f"decode steps of {n} token{'s' * (n > 1)} in slots, {what}, ejkernel", build, OURS, tokens=n)
    for what, build in (("selective scan", "scan_steps"), ("causal convolution", "convolution_steps"))
    for n in (1, 8)
)
VECTORS = tuple(
    case(f"{what}{', and its gradients' * gradient}, ejkernel", build, OURS, gradient=gradient)
    for what, build in (
        ("causal convolution", "convolution"),
        ("selective scan", "scan"),
        ("cross-entropy from hidden states", "linear_cross_entropy"),
    )
    for gradient in (False, True)
)
SELECTED = tuple(
    case(
        f"{what}, 16384 tokens, 16 heads a KV head{', and its gradients' * gradient}, ejkernel",
        "selected_blocks",
        OURS,
        dense=dense,
        gradient=gradient,
    )
    for what, dense in (("selected blocks", False), ("dense causal attention", True))
    for gradient in ((False, True) if not dense else (False,))
)
INDEXED = tuple(
    case(f"lightning indexer, 256 queries, {n} keys, ejkernel", "selected_keys", OURS, keys=n) for n in (32768, 131072)
) + tuple(
    case(
        f"lightning indexer, decode, 16 x {t} queries, {n} keys, {of}, ejkernel", "selected_keys_decode", OURS, **kwargs
    )
    for t, n, of, kwargs in (
        (1, 32768, "bfloat16", {"keys": 32768}),
        (1, 32768, "float8", {"keys": 32768, "key_dtype": "float8_e4m3fn"}),
        (2, 32768, "bfloat16", {"keys": 32768, "queries": 2}),
        (8, 32768, "bfloat16", {"keys": 32768, "queries": 8}),
        (1, 131072, "bfloat16", {"keys": 131072}),
    )
)
LISTED = tuple(
    case(f"listed keys, {kind}, 128 queries, {n} keys, ejkernel", "listed_keys", OURS, keys=n, latent=kind == "latent")
    for kind in ("grouped", "latent")
    for n in (8192, 32768)
)
UNION = tuple(
    case(f"union of lists, 16 queries, {n} keys, {what}, ejkernel", "listed_union", OURS, keys=n, shared=share)
    for n in (32768, 131072)
    for what, share in (("random lists", 0.0), ("80% of the list before", 0.8))
)
BLOCKS = tuple(
    case(f"listed blocks, decode, {what}, ejkernel", "listed_blocks_decode", OURS, keys=32768, **kwargs)
    for what, kwargs in (
        ("16 x 1 queries, 16 blocks of 64", {}),
        ("16 x 1 queries, 16 blocks of 64, dense", {"dense": True}),
        ("16 x 1 queries, 64 blocks of 64", {"blocks": 64}),
    )
)
MASKED = tuple(
    case(f"flash attention, {mask}{by}, ejkernel", "masked_attention", OURS, mask=mask, by_function=bool(by))
    for mask in ("causal", "window", "documents")
    for by in ("", " by mask_mod")
    if mask != "causal" or by  # the first row has it
)
QUICK = (
    case("flash attention, ejkernel", "attention", OURS),
    case("flash attention, JAX flash, blocks of 1024", "flash", block=1024),
    GROUPED[0],
    case("paged decode, ejkernel", "pages", OURS, queries=1),
)
ALL = (
    QUICK[0],
    case("flash attention, JAX flash, blocks of 512", "flash", block=512),
    QUICK[1],
    case("flash attention, JAX splash, blocks of 512", "splash", block_q=512, block_kv=512),
    case("flash attention, JAX splash, blocks of 1024", "splash", block_q=1024, block_kv=1024),
    case("flash attention, JAX splash, blocks of 1024x2048", "splash", block_q=1024, block_kv=2048),
    case(f"{BOTH}, ejkernel", "attention", OURS, gradient=True),
    case("flash attention, slopes by score_mod, ejkernel", "attention", OURS, has_slopes=True),
    case(f"{BOTH}, slopes by score_mod, ejkernel", "attention", OURS, gradient=True, has_slopes=True),
    case(f"{BOTH}, JAX flash, blocks of 512", "flash", block=512, gradient=True),
    case(f"{BOTH}, JAX splash, blocks of 512", "splash", block_q=512, block_kv=512, gradient=True),
    case(f"{BOTH}, JAX splash, blocks of 1024", "splash", block_q=1024, block_kv=1024, gradient=True),
    QUICK[3],
    case("paged decode, TurboQuant of 4 bits, ejkernel", "code_pages", OURS, signs=0),
    case("paged decode, TurboQuant of 4 bits and 128 signs, ejkernel", "code_pages", OURS),
    case("paged decode, TurboQuant of 3 bits, ejkernel", "code_pages", OURS, signs=0, bits=3),
    case("paged decode, TurboQuant of 3 bits and 128 signs, ejkernel", "code_pages", OURS, bits=3),
    case("paged decode, JAX ragged, 64 pages a block", "ragged_pages", queries=1),
    case("paged decode of 8 draft tokens, ejkernel", "pages", OURS, queries=8),
    case("paged decode of 8 draft tokens, a tree per sequence, ejkernel", "pages", OURS, queries=8, trees=True),
    case("paged decode, shared prefix of 1792, ejkernel", "pages", OURS, queries=1, prefix=1792),
    case("paged prefill of 512, ejkernel", "pages", OURS, queries=512),
    *(
        case(f"paged {kind}, {term}{by}, ejkernel", "pages_with_term", OURS, term=term, by_function=bool(by), queries=n)
        for kind, n in (("decode", 1), ("prefill of 512", 512))
        for term, name in (
            ("window", "mask_mod"),
            ("slopes", "score_mod"),
            ("soft cap", "score_mod"),
            ("documents", "mask_mod"),
        )
        for by in (("", f" by {name}") if term != "documents" else (f" by {name}",))
    ),
    case("paged prefill of 512, JAX ragged, 32 pages a block", "ragged_pages", queries=512, pages=32, q_block=128),
    *LATENT,
    *GROUPED,
    *GATED,
    *QUANTISED,
    *RINGS,
    *COLLECTIVE,
    *RECURRENCES,
    *STEPS,
    *VECTORS,
    *SELECTED,
    *MASKED,
    *INDEXED,
    *LISTED,
    *UNION,
    *BLOCKS,
)


def passes(label: str) -> Sequence[str]:
    """Which passes a case of both has rows of: of one device, forward has a case of its own."""
    return () if not label.startswith(BOTH) else ("forward", "backward") if "ring" in label else ("backward",)


def parts(report: Report) -> Iterable[Report]:
    """A report, and where it is of both passes that of each by itself."""
    yield report
    for name in passes(report.label) if report.error is None else ():
        back = name == "backward"
        kernels = tuple(kernel for kernel in report.kernels if bool(OF_BACKWARD.search(kernel.name)) == back)
        # Five of the seven products are of the backward pass, and eight of the twelve arrays.
        flops, size = (
            (report.flops or 0) * (5 if back else 2) / 7,
            (report.min_hbm_bytes or 0) * (8 if back else 4) / 12,
        )
        label = report.label.replace(BOTH, name)
        yield dataclasses.replace(report, label=label, kernels=kernels, flops=flops, min_hbm_bytes=size)


def row(report: Report) -> Sequence[object]:
    if report.error is not None:
        return (report.label, "-", *[""] * (len(COLUMNS) - 3), report.error.splitlines()[0][:100])
    kernels = report.kernels
    doubtful = any(kernel.simulation.unknown_reads or not kernel.simulation.is_complete for kernel in kernels)
    busy = sum(kernel.mxu * kernel.seconds for kernel in kernels) / report.seconds
    return (
        report.label,
        f"{report.seconds * 1e6:.0f}" + (" (values unknown)" if doubtful else ""),
        f"{(report.min_seconds_of_any_kernel or 0) * 1e6:.0f}",
        f"{report.mfu or 0:.1%}",
        f"{sum(kernel.compute_seconds for kernel in kernels) * 1e6:.0f}",
        f"{sum(kernel.memory_seconds for kernel in kernels) * 1e6:.0f}",
        f"{sum(kernel.link_seconds for kernel in kernels) * 1e6:.0f}",
        f"{busy:.0%}",
        f"{max(kernel.vmem_bytes for kernel in kernels) / 2**20:.1f}",
        sum(kernel.spills for kernel in kernels),
        sum(kernel.fills for kernel in kernels),
    )


def labels() -> Iterable[str]:
    """Every row's name, in order."""
    for made in ALL:
        yield from (made.label, *(made.label.replace(BOTH, name) for name in passes(made.label)))


def read_rows(path: Path) -> dict[str, dict[str, Sequence[object]]]:
    """Target -> kernel -> row, of a file that this script wrote; none where there is no file."""
    found: dict[str, dict[str, Sequence[object]]] = {}
    target = ""
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("## "):
            target = line.removeprefix("## ").strip()
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) == len(COLUMNS) and cells[0] != COLUMNS[0]:
            found.setdefault(target, {})[cells[0]] = cells
    return found


def write_rows(path: Path, found: Mapping[str, Mapping[str, Sequence[object]]]) -> None:
    """Writes the rows of kernels that there still are, in the order of the cases."""
    intro = "Updated row by row, last by the command below: the estimates are the same in every run"
    parts = [f"{intro}\n\n{shared.report.heading()}"]
    for target in filter(found.get, CHIPS):
        rows = [found[target][label] for label in labels() if label in found[target]]
        parts.append(f"## {target}\n\n{shared.report.markdown_table(COLUMNS, rows)}\n")
    path.write_text("\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a kernel of each kind, for v5e")
    parser.add_argument("--target", action="append", choices=list(CHIPS), help="repeatable; all if left out")
    parser.add_argument("--only", action="append", help="a word in the kernel's name; repeatable")
    parser.add_argument("--update", type=Path, help="file of results whose rows are replaced, and others kept")
    arguments = parser.parse_args()
    print(shared.report.heading())
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu is not installed: pip install 'ejkernel-pallas[aot]'")
        return
    words = arguments.only or [""]
    cases = [made for made in (QUICK if arguments.quick else ALL) if any(word in made.label for word in words)]
    for target in arguments.target or (["v5e"] if arguments.quick else CHIPS):
        reports = profile_many(cases, target=target)
        rows = [row(part) for report in reports for part in parts(report)]
        print(f"## {target}\n\n{shared.report.markdown_table(COLUMNS, rows)}\n", flush=True)
        if arguments.update is not None:
            found = read_rows(arguments.update)
            found.setdefault(target, {}).update({str(cells[0]): cells for cells in rows})
            write_rows(arguments.update, found)


if __name__ == "__main__":
    main()
