"""The kernel of paged attention, and its helpers by stage."""
