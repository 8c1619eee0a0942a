"""Those that Triton compiles."""
