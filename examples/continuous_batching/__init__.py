"""The pieces of `examples/serve.py`: the decoder, the server with its page allocator, and the checks of its logits."""
