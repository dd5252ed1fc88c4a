"""What the GPU backends share: packed weights, dispatch, routing, workspaces, launches. The GEMMs are their own."""
