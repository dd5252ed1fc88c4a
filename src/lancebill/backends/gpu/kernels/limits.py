"""What the kernels can hold, as plain values: plans keep to these limits, whatever the tuning data say."""

MOST_SLOTS = 32  # of a call with one tile per slot, or of a token with strips: each is a lane of a warp
MOST_SIZES = 8  # token tiles of a GEMM, and its launches
LARGEST_SIZE = 255  # rows of a token tile: sizes are bytes
