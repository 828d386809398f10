"""Settings of every test."""

import os

# Tests look into Python modules; tests/house/test_compiled.py runs a part of them on compiled ones.
os.environ.setdefault("SPANLAB_COMPILED", "never")
