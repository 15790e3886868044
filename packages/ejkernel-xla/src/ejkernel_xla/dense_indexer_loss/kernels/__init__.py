"""The tiles of scores that both passes of the dense indexer loss share."""
