"""The entry `conformance`: whether a model is served exactly, property by property."""
