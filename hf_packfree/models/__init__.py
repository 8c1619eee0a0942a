"""One file per transformers family: exact-type subclasses that add the packed branch."""
