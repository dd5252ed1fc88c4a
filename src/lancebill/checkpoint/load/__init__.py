"""Load experts: read slices, decode them, cut this rank's shard, pack it into a backend's layout."""
