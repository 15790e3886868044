"""The backward pass on Hopper."""
