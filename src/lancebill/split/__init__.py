"""One layer on two devices: some experts on the layer's own device, the others in host memory, computed by the CPU."""
