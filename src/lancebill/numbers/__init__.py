"""Number formats: data types, specs and their names, canonical weights, quantisation, bit packing."""
