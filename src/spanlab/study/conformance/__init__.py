"""The entry `conformance`: checks whether a model is served exactly, one property at a time."""
