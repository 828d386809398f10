"""Tables and the figure of a sweep."""
