"""The configuration chain: seven tiers, their storage and their keys."""
