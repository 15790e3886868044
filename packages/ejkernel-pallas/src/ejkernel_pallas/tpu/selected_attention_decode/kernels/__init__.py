"""The kernel of the decode step of native sparse attention."""
