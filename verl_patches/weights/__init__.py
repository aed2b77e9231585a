"""Read and write weights on disk: sharded run folders, HF folders, conversion between them, FP8 block scales."""
