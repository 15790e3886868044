"""Chooses both passes of a call that is differentiated, where an implementation may be a pair of passes."""

import dataclasses
from collections.abc import Mapping, Sequence

from ejkernel.ops.dispatch import PAIRED_REMARK, Choice, Verdict, with_first_chosen
from ejkernel.ops.model import Implementation


def choose_pair(forward: Choice, backward: Choice) -> tuple[Choice, Choice]:
    """Returns the two choices for a call that is differentiated, from the choices for each pass alone.

    A paired implementation serves both passes or neither; any other forward pass needs some backward pass that is not
    paired. The first forward pass for which this holds is chosen. An implementation of the forward pass alone gives way
    to a pair whose backward pass comes before those that could follow it: in a differentiated call that pass is most
    of the work.
    """
    # The first forward pass with a backward pass is chosen, and then a backward pass that fits it: a fast backward pass
    # never brings a slower forward pass with it, unless the two are paired.
    forwards = {v.implementation.name: v for v in forward.verdicts}
    backwards = {v.implementation.name: v for v in backward.verdicts}
    unpaired = any(v.status != "refused" and not v.implementation.paired for v in backward.verdicts)
    forward_verdicts = [_verdict_before_backward(v, backwards, unpaired) for v in forward.verdicts]
    pair = _first_usable_pair(forward_verdicts, backward)
    forward_verdicts = with_first_chosen([_refuse_unless_pair(v, pair) for v in forward_verdicts])
    chosen = next((v.implementation for v in forward_verdicts if v.status == "chosen"), None)
    second = [_verdict_after_forward(v, forwards, chosen) for v in backward.verdicts]
    if chosen is None or not chosen.paired:
        followers = with_first_chosen(second)
    else:
        same = [
            dataclasses.replace(v, status="chosen", remark=PAIRED_REMARK) for v in second if v.implementation is chosen
        ]
        followers = tuple(same[0] if v.implementation is chosen else v for v in second)
    return dataclasses.replace(forward, verdicts=forward_verdicts), dataclasses.replace(backward, verdicts=followers)


def exclude_paired(choice: Choice) -> Choice:
    """Returns a choice among the implementations that are not paired."""
    reason = "paired, and the passes of this call are chosen apart"
    verdicts = [
        dataclasses.replace(v, status="refused", reasons=(*v.reasons, reason)) if v.implementation.paired else v
        for v in choice.verdicts
    ]
    return dataclasses.replace(choice, verdicts=with_first_chosen(verdicts))


def _verdict_before_backward(verdict: Verdict, backward_verdicts: Mapping[str, Verdict], unpaired: bool) -> Verdict:
    """Returns the verdict on a forward pass if a backward pass has to follow it."""
    if verdict.status == "refused":
        return verdict
    if not verdict.implementation.paired:
        reasons = () if unpaired else ("no backward pass serves after it",)
    else:
        same = backward_verdicts[verdict.implementation.name]
        reasons = tuple(f"paired, and its backward refuses: {reason}" for reason in same.reasons)
    return dataclasses.replace(verdict, status="refused", reasons=reasons) if reasons else verdict


def _first_usable_pair(forward_verdicts: Sequence[Verdict], backward: Choice) -> Implementation | None:
    """Returns the paired implementation whose backward pass is the first that can follow some forward pass; None if
    that pass is not paired, or if another forward pass that has a backward pass comes before its own.
    """
    usable = {v.implementation.name for v in forward_verdicts if v.status != "refused"}
    following = (
        v.implementation
        for v in backward.verdicts
        if v.status != "refused" and (not v.implementation.paired or v.implementation.name in usable)
    )
    first = next(following, None)
    forward = next(
        (v.implementation for v in forward_verdicts if v.status != "refused" and not _is_forward_only(v)), None
    )
    return first if first is not None and first.paired and first is forward else None


def _refuse_unless_pair(verdict: Verdict, pair: Implementation | None) -> Verdict:
    """Returns the verdict on a forward pass; an implementation of that pass alone is refused if there is a pair."""
    if verdict.status == "refused" or pair is None or not _is_forward_only(verdict):
        return verdict
    reason = f"it has no backward pass, and that of {pair.name!r}, which is paired, comes first"
    return dataclasses.replace(verdict, status="refused", reasons=(reason,))


def _is_forward_only(verdict: Verdict) -> bool:
    return not verdict.implementation.paired and verdict.implementation.backward is None


def _verdict_after_forward(
    verdict: Verdict, forward_verdicts: Mapping[str, Verdict], chosen_forward: Implementation | None
) -> Verdict:
    """Returns the verdict on a backward pass, now that the forward pass is chosen."""
    implementation = verdict.implementation
    if verdict.status == "refused" or not implementation.paired or implementation is chosen_forward:
        return verdict
    same = forward_verdicts.get(implementation.name)
    reasons = tuple(f"paired, and its forward refuses: {reason}" for reason in (same.reasons if same else ()))
    reasons = reasons or ("paired, and another forward pass is chosen",)
    return dataclasses.replace(verdict, status="refused", reasons=reasons)
