"""Models described by a config.json of Hugging Face: finding the file, and the sizes that it defines."""
