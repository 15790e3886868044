"""The layers of transformers that the recipes port: how each is built and called. Only `nox -s models` imports them."""
