"""Parts of a call, as they are computed on each of several devices."""

from ejkernel_conformance import shards
from ejkernel_conformance.served import last_shard_refused, unless
from ejkernel_conformance.subjects import Subject


@unless(last_shard_refused)
def test_shard(ejk_subject: Subject) -> None:
    """The last shard is the last part of the whole."""
    shards.check_shard(ejk_subject)
