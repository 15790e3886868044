"""The schedules: of decoding, and of prefill."""
