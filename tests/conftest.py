"""Settings of every test."""

import os

# Tests look into Python modules; tests/architecture/test_compiled.py runs a part of them on compiled ones.
os.environ.setdefault("SPANLAB_COMPILED", "never")
