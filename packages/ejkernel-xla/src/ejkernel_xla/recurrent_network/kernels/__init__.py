"""The pieces that both passes of recurrent network are computed with."""
