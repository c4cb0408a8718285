"""What must move, as arithmetic: group kinds, regions, the pairs of blocks, descriptors and runs. NumPy at most."""
