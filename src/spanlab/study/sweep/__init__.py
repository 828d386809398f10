"""One study at several values of some settings."""
