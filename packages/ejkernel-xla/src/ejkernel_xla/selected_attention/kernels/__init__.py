"""The pieces that both passes of selected attention are computed with."""
