"""The steps of the cross-entropy's passes."""
