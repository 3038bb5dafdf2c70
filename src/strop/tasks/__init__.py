"""Where tasks come from: mutation of real functions, differential tests, the admission gate, the pool on disk."""
