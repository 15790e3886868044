"""The evidence that backends ship is about the sources that there are, or says that it is not."""

import pytest

from ejkernel.ops import evidence
from ejkernel_conformance.confirm.toolchain import digests, implementations

BACKENDS = ("ejkernel_triton", "ejkernel_pallas", "ejkernel_cuda")
FILES = [(backend, file) for backend in BACKENDS for file in evidence.evidence_files(f"{backend}:evidence")]
IMPLEMENTATIONS_WITH_EVIDENCE = {key: one for key, one in implementations().items() if one.evidence is not None}
HOW_TO_RENEW = (
    "Run the tests again on a GPU (`python3 -m nox -s confirm`), or mark the evidence as stale "
    "(`python3 -m ejkernel_conformance.confirm merge`): the kernels then come after those that are confirmed"
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kernel_says_where_its_evidence_is(backend):
    folders = {one.evidence for one in implementations().values() if one.forward.startswith(f"{backend}.")}
    assert folders == {f"{backend}:evidence"}


def test_evidence_is_marked_stale_if_its_digest_differs():
    current = digests(IMPLEMENTATIONS_WITH_EVIDENCE)
    wrong = [
        f"{file.name}, {family} on {one.device} with {one.toolchain}: stale is {found.stale}"
        for _, file in FILES
        for content in [evidence.decode(file.read_bytes())]
        for one in content.confirmations
        for family, found in one.families.items()
        if found.stale != (found.digest != current.get(f"{family}/{content.implementation}"))
    ]
    assert not wrong, "\n".join([*wrong, HOW_TO_RENEW])


def test_evidence_files_are_named_for_implementation_and_chip():
    for backend, file in FILES:
        content = evidence.decode(file.read_bytes())
        chip = str(file).replace("\\", "/").split("/")[-2]
        assert (f"{content.implementation}.json", content.chip) == (file.name, chip)
        assert {family for one in content.confirmations for family in one.families} <= {
            family for family, name in IMPLEMENTATIONS_WITH_EVIDENCE if name == content.implementation
        }
        assert all(
            IMPLEMENTATIONS_WITH_EVIDENCE[key].evidence == f"{backend}:evidence"
            for key in IMPLEMENTATIONS_WITH_EVIDENCE
            if key[1] == content.implementation
        )
