"""Tables and figures of analyses, one or two files each."""
