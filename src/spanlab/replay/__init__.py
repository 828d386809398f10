"""Replay of requests against a real OpenAI-compatible server, at their scheduled times."""
