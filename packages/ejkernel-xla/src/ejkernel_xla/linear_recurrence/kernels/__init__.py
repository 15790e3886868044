"""The pieces that both passes of linear recurrence are computed with."""
