"""Memory tiers below the device: their contents, and the transfers between them."""
