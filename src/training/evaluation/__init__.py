"""Zero-shot classification and retrieval on all ranks: each sample once, one figure on any number of them."""
