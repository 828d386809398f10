"""Requests sent to a real OpenAI-compatible server at the times of their schedule."""
