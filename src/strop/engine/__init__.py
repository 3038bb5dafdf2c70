"""Token generation: the embedded engine with continuous batching, and the conformance suite of the port."""
