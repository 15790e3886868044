"""Implements `--json`, which prints one JSON document on the standard output and nothing else there."""

import dataclasses
from typing import Any

import click
import msgspec

from ejkernel.ops.dispatch import Choice, Decision, Verdict
from ejkernel.ops.plugins import Plugin

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
"""Gives a command the flag `as_json`."""


def print_json(value: Any) -> None:
    """Prints plain data as indented JSON. A number that JSON does not have is null."""
    click.echo(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2))


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """Converts both directions of a decision to plain data."""
    differentiated = decision.differentiated_forward
    return {
        "forward": choice_to_dict(decision.forward),
        "backward": choice_to_dict(decision.backward),
        "differentiated": None if differentiated is None else choice_to_dict(differentiated),
    }


def choice_to_dict(choice: Choice) -> dict[str, Any]:
    """Converts one direction of a decision to plain data."""
    chosen = choice.implementation
    return {
        "operation": choice.op,
        "direction": choice.direction,
        "device": dataclasses.asdict(choice.device),
        "platform": choice.platform,
        "implementation": None if chosen is None else chosen.name,
        "verdicts": [_verdict_to_dict(verdict) for verdict in choice.verdicts],
        "failed_plugins": [plugin_to_dict(failed) for failed in choice.failed_plugins],
        "notes": list(choice.notes),
        "config": None if choice.config is None else msgspec.to_builtins(choice.config),
        "tier": choice.tier,
        "trail": list(choice.trail),
    }


def plugin_to_dict(plugin: Plugin) -> dict[str, Any]:
    """Converts a plugin to plain data."""
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "error": plugin.error,
        "notes": list(plugin.notes),
    }


def _verdict_to_dict(verdict: Verdict) -> dict[str, Any]:
    implementation = verdict.implementation
    return {
        "implementation": implementation.name,
        "platform": implementation.platform,
        "priority": verdict.priority,
        "status": verdict.status,
        "reasons": list(verdict.reasons),
        "remark": verdict.remark,
        "unconfirmed": verdict.unconfirmed_reason or None,
        "confirmed": verdict.confirmed_on or None,
    }
