"""Models by the config.json of Hugging Face: where it is found, and what sizes it says."""
