"""The GEMMs of Hopper in Gluon: `gemm` over lists of tiles, `decode` for few tokens. They need wgmma and TMA."""
