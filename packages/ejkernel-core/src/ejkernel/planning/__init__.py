"""Planning code that backends share: tiles, packing, softmax merging, paged caches, rings, dropout."""
