"""Studies: arms × seeds × loads, their folder, their summary."""
