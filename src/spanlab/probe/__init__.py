"""A small hybrid model that anyone can train, and what its answers lose when documents are encoded apart."""

from __future__ import annotations
