"""`--json`: what a command found, for programs. One document on the standard output, and nothing else there."""

import dataclasses
from typing import Any

import click
import msgspec

from ejkernel.ops.dispatch import Choice, Decision, Verdict
from ejkernel.ops.plugins import Plugin

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
"""Gives a command the flag `as_json`."""


def print_json(value: Any) -> None:
    """Prints plain data as indented JSON. A number that JSON does not have is null."""
    click.echo(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2))


def plain_decision(found: Decision) -> dict[str, Any]:
    """Both directions of a decision as plain data."""
    differentiated = found.differentiated
    return {
        "forward": plain_choice(found.forward),
        "backward": plain_choice(found.backward),
        "differentiated": None if differentiated is None else plain_choice(differentiated),
    }


def plain_choice(found: Choice) -> dict[str, Any]:
    """One direction of a decision as plain data."""
    chosen = found.implementation
    return {
        "operation": found.op,
        "direction": found.direction,
        "device": dataclasses.asdict(found.device),
        "platform": found.platform,
        "implementation": None if chosen is None else chosen.name,
        "verdicts": [_verdict(verdict) for verdict in found.verdicts],
        "failed_plugins": [plain_plugin(failed) for failed in found.failed_plugins],
        "notes": list(found.notes),
        "config": None if found.config is None else msgspec.to_builtins(found.config),
        "tier": found.tier,
        "trail": list(found.trail),
    }


def plain_plugin(found: Plugin) -> dict[str, Any]:
    """A plugin as plain data."""
    return {"name": found.name, "distribution": found.distribution, "error": found.error, "notes": list(found.notes)}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    implementation = verdict.implementation
    return {
        "implementation": implementation.name,
        "platform": implementation.platform,
        "priority": implementation.priority,
        "status": verdict.status,
        "reasons": list(verdict.reasons),
        "remark": verdict.remark,
        "unconfirmed": verdict.unconfirmed or None,
    }
