"""The pieces that both passes of selective scan are computed with."""
