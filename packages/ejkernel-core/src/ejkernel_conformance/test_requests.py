"""NaN, infinities and the largest numbers in half of the requests that a call serves."""

from ejkernel_conformance import requests
from ejkernel_conformance.served import refused, unless
from ejkernel_conformance.subjects import Subject


@unless(refused("forward"))
def test_requests(ejk_requests: Subject) -> None:
    """NaN, infinities and the largest numbers of a request reach no output and no state of the other requests."""
    requests.check_requests(ejk_requests)


@unless(refused("forward", "backward"))
def test_request_gradients(ejk_requests_differentiable: Subject) -> None:
    """NaN, infinities and the largest numbers of a request reach no gradient of the other requests."""
    requests.check_request_gradients(ejk_requests_differentiable)
