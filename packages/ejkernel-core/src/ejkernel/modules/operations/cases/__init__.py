"""Input makers: the named cases of every operation, and inputs of given shapes."""
