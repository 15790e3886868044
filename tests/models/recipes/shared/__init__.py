"""Layers that several recipes share; a recipe says what its model changes in them."""
