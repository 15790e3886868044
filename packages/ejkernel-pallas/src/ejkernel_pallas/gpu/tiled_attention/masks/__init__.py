"""Which pairs attend: block maps, masks of a tile, padding and dropout."""
