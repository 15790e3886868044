"""Parts of a call, as they are computed on each of several devices."""

from ejkernel_conformance import claims, shards
from ejkernel_conformance.skips import skip_if_refused
from ejkernel_conformance.subjects import Subject, abstract_record


def test_shard(ejk_subject: Subject) -> None:
    """The last shard is the last part of the whole."""
    skip_if_refused(ejk_subject, "forward")
    whole = abstract_record(ejk_subject.op, ejk_subject.case)
    claims.check_sharding_fields(ejk_subject.op, ejk_subject.implementation, ejk_subject.case)
    skip_if_refused(ejk_subject, "forward", record=shards.abstract_last_shard(ejk_subject.op.family, whole))
    shards.check_shard(ejk_subject)
