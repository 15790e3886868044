"""What backends share about work: which tiles there are, packing, softmax merging, paged caches, rings, dropout."""
