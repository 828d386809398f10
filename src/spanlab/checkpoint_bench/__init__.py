"""Recurrent checkpoints measured on the real engine: what taking them costs, and what starting from them saves."""
