"""Writers: requests as lines of traces and request files that other tools replay."""
