"""What is computed: the problem, routing, dispatch, the activation between two GEMMs, the layout of weights."""
