"""From files to packed experts: slices read, decoded, cut for this rank, packed as a backend wants them."""
