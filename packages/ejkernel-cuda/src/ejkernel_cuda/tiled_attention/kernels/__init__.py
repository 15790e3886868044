"""The custom calls of cuDNN's attention."""
